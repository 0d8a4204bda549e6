"""Laws of the corpus, the tokenizer and the batches."""

import concurrent.futures
import errno
import gzip
import hashlib
import importlib.resources
import json
import os
import pathlib
import tracemalloc

import numpy as np
import pytest
import tokenizers

from course_lib import files
from course_lib.text import data

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path):
    """A small corpus."""
    for name in ("a.txt", "b.txt", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"this is {name}", encoding="utf-8")
    return tmp_path


def test_the_corpus_is_the_one_that_was_built_with_its_licence_and_its_source():
    folder = importlib.resources.files("course_lib.text").joinpath("corpus")
    packed = folder.joinpath(data.CORPUS).read_bytes()
    assert hashlib.sha256(gzip.decompress(packed)).hexdigest() == data.CORPUS_SHA256
    licence = folder.joinpath("LICENSE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "3.13.0" in folder.joinpath("SOURCE.md").read_text()


def test_no_document_is_in_both_splits_and_both_hold_english_and_code():
    splits = [data.documents(split) for split in data.SPLITS]
    for part in ("name", "text"):
        train, validation = ({getattr(d, part) for d in split} for split in splits)
        assert not train & validation
    train, validation = ({document.name for document in split} for split in splits)
    for names in (train, validation):
        assert {name.split("/")[0] for name in names} == {"lib", "topics"}
    sizes = [sum(len(document.text) for document in split) for split in splits]
    assert 0.08 < sizes[1] / sum(sizes) < 0.16


def test_any_text_survives_the_tokenizer():
    tokenizer = data.tokenizer()
    for text in ("def f(x):\n\treturn 'é'", "漢字 \N{PILE OF POO}\r\n\x00", "", "  two  "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_tokens_are_the_documents_each_closed_by_the_end_token():
    tokens, tokenizer = data.tokens("validation"), data.tokenizer()
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.token_to_id(data.END)))
    texts = [tokenizer.decode(part.tolist()) for part in parts]
    assert texts == [*[document.text for document in data.documents("validation")], ""]
    assert tokenizer.get_vocab_size() == data.VOCAB_SIZE > tokens.max()


def test_the_tokenizer_has_not_seen_the_validation_split():
    texts = [document.text for document in data.documents("train")]
    assert data._train_tokenizer(texts, data.VOCAB_SIZE).to_str() == data.tokenizer().to_str()


def test_tokens_are_those_of_the_documents_and_stay_on_disk(folder, monkeypatch):
    for split, corpus in (("validation", "shipped"), ("train", folder)):
        tokens = data.tokens(split, corpus)
        assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
        texts = [document.text for document in data.documents(split, corpus)]
        np.testing.assert_array_equal(tokens, data.encode(data.tokenizer(), texts))
        monkeypatch.setattr(data, "GROUP", 20)  # several pieces


def test_files_of_equal_text_are_in_one_split(tmp_path):
    def splits():
        return [{d.name: d.text for d in data.documents(n, tmp_path)} for n in data.SPLITS]

    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"this is {number}")
    before = splits()
    for number in range(30):
        os.link(tmp_path / f"{number}.txt", tmp_path / f"{number}.txt.link")
        (tmp_path / f"z{number}").write_text(f"this is {number}", encoding="utf-8-sig")
    for once, thrice in zip(before, splits(), strict=True):
        assert once.items() <= thrice.items() and len(thrice) == 3 * len(once)
        assert {*once.values()} == {*thrice.values()}


def test_hidden_files_and_backups_are_no_text(folder):
    before = data.text_files(folder)
    for name in (".a.txt.swp", "a.txt~", ".git/HEAD", "c/.ipynb_checkpoints/d.txt", "old~/e"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0")
    os.mkfifo(folder / ".git" / "socket")
    assert data.text_files(folder) == before


def test_documents_are_read_one_after_another(folder, monkeypatch):
    monkeypatch.setattr(data, "GROUP", 1)
    alive = []
    monkeypatch.setattr(
        data, "encode", lambda model, texts: alive.append(len(texts)) or np.zeros(1, np.uint16)
    )
    data.tokens("train", folder)
    assert alive == [1, 1]


def test_a_folder_that_changes_while_it_is_read_is_refused_and_leaves_no_file(
    folder, cache, monkeypatch
):
    data.tokens("validation", folder)
    before, encode = set(cache.iterdir()), data.encode

    def written_meanwhile(model, texts):
        (folder / "a.txt").write_text("after")
        return encode(model, texts)

    monkeypatch.setattr(data, "encode", written_meanwhile)
    with pytest.raises(OSError, match="changed while it was read"):
        data.tokens("train", folder)
    assert set(cache.iterdir()) == before


def with_a_bit_flipped(content):
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:3], with_a_bit_flipped]
)
def test_a_file_of_the_cache_is_made_once_and_again_if_it_is_damaged(
    folder, capsys, damage, monkeypatch
):
    first = np.array(data.tokens("train", folder))
    with monkeypatch.context() as patch:
        patch.setattr(data, "encode", lambda *args: pytest.fail("prepared again"))
        data.tokens("train", folder)
    path = pathlib.Path(data.tokens("train", folder).filename)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    np.testing.assert_array_equal(data.tokens("train", folder), first)
    assert f"{path.name} is damaged" in capsys.readouterr().out and path.read_bytes() == content
    data.tokens("train", folder)
    assert not capsys.readouterr().out


def test_one_prepares_the_tokens_and_the_others_wait(folder, cache, monkeypatch):
    data.tokenizer()
    encode, called = data.encode, []

    def locked(model, texts):
        called.append(texts)
        with pytest.raises(BlockingIOError), files.locked(cache):
            pass
        return encode(model, texts)

    monkeypatch.setattr(data, "encode", locked)
    # a lock is that of an open file, not of a process
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: data.tokens("train", folder), range(3)))
    assert len(called) == 1
    for each in results:
        np.testing.assert_array_equal(each, results[0])


def test_a_cache_that_cannot_be_written_is_named(folder, monkeypatch):
    monkeypatch.setenv("COURSE_CACHE", str(folder / "a.txt" / "cache"))
    with pytest.raises(OSError, match="cannot be prepared: .*COURSE_CACHE names another"):
        data.tokens("train")


def test_an_empty_folder_is_refused_though_the_shipped_corpus_is_prepared(tmp_path):
    for split in data.SPLITS:
        data.tokens(split)
        with pytest.raises(ValueError, match="one file; it has 0: it is empty; is its disk"):
            data.tokens(split, tmp_path)


def test_the_same_files_under_other_names_are_another_corpus_since_names_choose_the_split(
    tmp_path,
):
    (inner := tmp_path / "inner").mkdir()
    for i in range(9):
        (inner / f"{i}.txt").write_text(f"{i}" * 9)
    for folder in (tmp_path, inner):
        [document] = data.documents("validation", folder)
        decoded = data.tokenizer().decode(data.tokens("validation", folder)[:-1])
        assert decoded == document.text
    assert data.tokens("validation", tmp_path)[0] != data.tokens("validation", inner)[0]


def test_a_document_that_may_not_be_read_is_named(folder, monkeypatch):
    read = pathlib.Path.read_bytes

    def forbidden(path):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    # for who runs the tests as root it would be readable
    monkeypatch.setattr(pathlib.Path, "read_bytes", forbidden)
    told = "'b.txt' is not UTF-8, or unreadable .*Permission denied"
    with pytest.raises(ValueError, match=told):
        for split in data.SPLITS:
            data.documents(split, folder)


def some_batches(seed, steps=50):
    sizes = dict(batch_size=3, seq_len=5, vocab_size=100)
    return [*data.batches(np.arange(100, dtype=np.uint16), seed=seed, steps=steps, **sizes)]


def test_a_batch_is_windows_of_the_text_and_its_labels_are_one_token_later():
    for batch in some_batches(0):
        assert batch.inputs.shape == batch.labels.shape == batch.weights.shape == (3, 5)
        np.testing.assert_array_equal(batch.labels, batch.inputs + 1)
        np.testing.assert_array_equal(batch.inputs, batch.inputs[:, :1] + np.arange(5))
        assert (batch.weights == 1).all()


def test_a_seed_gives_the_same_batches_again_and_another_seed_others():
    first, again, other = (some_batches(seed, 1)[0].inputs for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("length", [2, 17, 18, 100])
def test_validation_batches_hold_every_token_but_the_first_once_as_a_label(length):
    tokens = np.arange(length, dtype=np.uint16)
    batches = [*data.validation_batches(tokens, batch_size=2, seq_len=8, vocab_size=2048)]
    labels = np.concatenate([batch.labels[batch.weights == 1] for batch in batches])
    np.testing.assert_array_equal(labels, tokens[1:])
    assert all(batch.labels.shape == (2, 8) for batch in batches)


def test_a_validation_batch_is_made_when_it_is_asked_for():
    # 2 MB; all batches at once, and the positions in them, would be 28 MB
    tokens, sizes = np.zeros(10**6, np.uint16), dict(batch_size=4, seq_len=256, vocab_size=9)
    tracemalloc.start()
    try:
        for _ in data.validation_batches(tokens, **sizes):
            pass
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


LINES = [f"line {number} of a text" for number in range(30)]


def test_of_one_text_the_last_tenth_is_for_validation_and_no_line_is_cut(tmp_path):
    (path := tmp_path / "input.txt").write_text("\n".join(LINES), encoding="utf-8-sig")
    train, validation = (data.documents(split, path) for split in data.SPLITS)
    assert [one.name for one in (*train, *validation)] == ["input.txt"] * 2
    assert train[0].text + validation[0].text == "\n".join(LINES)
    assert train[0].text.endswith("\n") and 2 < len(validation[0].text.split("\n")) < 6
    for text in ("x" * 40, "a\n" + "x" * 38):  # one long line, perhaps below a title
        path.write_text(text)
        assert [len(data.documents(split, path)[0].text) for split in data.SPLITS] == [36, 4]


def test_each_line_of_json_is_a_document_packed_or_not_with_a_name_or_without(tmp_path):
    lines = [json.dumps({"text": text, "id": 7}) for text in (*LINES, LINES[3])]
    (path := tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (packed := tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    train, validation = ([d.text for d in data.documents(s, path)] for s in data.SPLITS)
    assert sorted(train + validation) == sorted((*LINES, LINES[3])) and len(validation) >= 3
    assert not {*train} & {*validation}
    assert train == [one.text for one in data.documents("train", packed)]
    twice = [json.dumps({"text": text, "name": i % 2}) for i, text in enumerate(LINES)]
    path.write_text("\n".join(twice))
    assert sum(len(data.documents(split, path)) for split in data.SPLITS) == len(LINES)


def test_a_tokenizer_of_the_own_text_needs_fewer_tokens_and_sees_no_validation(tmp_path):
    (path := tmp_path / "input.txt").write_text("abkhazianäöü\n" * 99, encoding="utf-8")
    own = data.tokenizer("own", path, 266)
    assert own.get_vocab_size() == 266 and data.end_of(own) == 0
    few, many = (len(data.tokens("train", path, model)) for model in (own, None))
    assert few < many
    train = [one.text for one in data.documents("train", path)]
    assert data._train_tokenizer(train, 266).to_str() == own.to_str()
    with pytest.raises(ValueError, match=r"vocab_size=9000 must be at most \d{3}: corpus="):
        data.tokenizer("own", path, 9000)
    for size in (256, 65_537):
        with pytest.raises(ValueError, match=rf"vocab_size={size} must be in \[257, 65536\]"):
            data.tokenizer("own", path, size)


def test_any_tokenizer_of_a_file_will_do_if_it_has_a_token_that_ends_a_document(tmp_path):
    words = {"<|endoftext|>": 70_000} | {f"w{i}": i for i in range(70_000)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(path := tmp_path / "tokenizer.json"))
    (text := tmp_path / "a.txt").write_text("w1 w65536 " * 9 + "w2")
    found = data.tokens("validation", text, data.tokenizer(str(path)))
    assert found.dtype == np.uint32 and found[-2:].tolist() == [2, 70_000]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"must have one of \('<\|end\|>'"):
        data.end_of(model)
    for wrong in (text, tmp_path / "none.json", "their"):
        with pytest.raises(ValueError, match="must be 'course', 'own' or a tokenizer.json"):
            data.tokenizer(str(wrong))


BAD_FILES = [
    ("a.txt", b"", "must hold more text: its last tenth"),
    ("a.txt", b"text \0", "'a.txt' holds zero bytes"),
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', r"line 2 must be an object .*KeyError"),
    ("a.jsonl", b'{"text": "a"}\n\n', "line 2 must be an object .*JSONDecodeError"),
    ("a.jsonl", b'["text"]', "line 1 must be an object .*TypeError"),
    ("a.jsonl", b'{"text": 3}', "line 1 must be an object .*AttributeError"),
    ("a.jsonl", b'{"text": "a"}', "must hold two documents or more"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "<|end|>"}', "line 2 holds '<|end|>'"),
    ("a.jsonl.gz", b'{"text": "a"}', "cannot be unpacked"),
]


@pytest.mark.parametrize("name, content, message", BAD_FILES)
def test_a_file_that_is_no_corpus_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.documents("train", tmp_path / name)


def test_links_are_followed_and_no_text_is_read_twice(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "inner").mkdir()
    (elsewhere / "inner" / "e.txt").write_text("e")
    targets = {"linked": elsewhere, "c/up": folder, "again": folder / "c"}
    for name, target in {**targets, "f.txt": elsewhere / "inner" / "e.txt"}.items():
        (folder / name).symlink_to(target)
    found = "a.txt again/d.txt b.txt f.txt linked/inner/e.txt"
    assert list(data.text_files(folder)) == found.split()


def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(folder, monkeypatch):
    scandir = os.scandir

    def forbidden(path):
        # the tests may run as root, to whom nothing is forbidden
        if os.fspath(path).endswith("/c"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(
        ValueError,
        match=rf"^corpus='{folder}': '{folder}/c' may not be read; permit it, or take another",
    ):
        data.text_files(folder)


BAD = [
    ({"seq_len": 0}, "seq_len=0"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"seq_len": 9}, "seq_len=9 must be under the number of tokens, 9"),
    ({"steps": 0}, "steps=0"),
    ({"vocab_size": 7}, r"tokens\[7\]=7 must be in \[0, vocab_size=7\)"),
    ({"tokens": np.array([4, -1, 2])}, r"tokens\[1\]=-1"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_what_gives_no_batches_is_refused_at_the_call(changes, message):
    asked = dict(tokens=np.arange(9), batch_size=1, seq_len=1, vocab_size=9, steps=1) | changes
    with pytest.raises(ValueError, match=message):
        data.batches(**asked, seed=0)


def test_one_token_is_no_label():
    with pytest.raises(ValueError, match="tokens must be two or more"):
        data.validation_batches(np.arange(1), batch_size=1, seq_len=3, vocab_size=9)


BAD_FOLDERS = [
    ({}, "no such file or folder"),
    ({"one": b""}, "must hold two documents or more .* it has 1"),
    (
        {"one": b"same", "two": b"same"},
        "must hold two documents or more that differ .* it has 1",
    ),
    (
        {"one": b"same", ".two": b"2"},
        "must hold two documents or more .* not hidden.* it has 1",
    ),
    ({"one": b"", "two": b"text"}, "the files of split='.*' are all empty"),
    ({"one": b"text", "two": b"a\0b\0"}, "'two' holds zero bytes"),
    ({"one": b"text", "two": b"\xff\xfe"}, "'two' is not UTF-8"),
    ({"one": b"text", "two": b"a <|end|> b"}, "'two' holds '<|end|>', which ends"),
    ({"one": b"text", "gone": None}, "gone' is neither a file nor a folder"),
    ({"one": b"text", b"caf\xe9": b""}, r"caf\\udce9' has a name that is not UTF-8"),
]


@pytest.mark.parametrize("content, message", BAD_FOLDERS)
def test_a_folder_that_is_no_corpus_is_refused(tmp_path, content, message):
    folder = os.path.join(os.fsencode(tmp_path), b"corpus")
    for name, text in content.items():
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, os.fsencode(name))
        if text is None:
            os.symlink(b"nothing", path)
        else:
            with open(path, "wb") as file:
                file.write(text)
    with pytest.raises(ValueError, match=message):
        [data.documents(split, tmp_path / "corpus") for split in data.SPLITS]
