#!/bin/sh
# Transformers: for a folder of a Qwen2 model, `AutoTokenizer` splits words as Qwen does, whatever
# tokenizer.json says.
#
# Seen with Transformers 5.24.0 and Tokenizers 0.23.3. A folder holds a byte-level tokenizer.json, a
# config.json that names only the type of the model, and a tokenizer_config.json that says
# `"tokenizer_class": "PreTrainedTokenizerFast"`:
#
#     model_type    AutoTokenizer.from_pretrained    ids
#     llama         TokenizersBackend                those of tokenizer.json
#     qwen2         Qwen2Tokenizer                   others, without an error
#
# A good guess would have been that both use the file, as `PreTrainedTokenizerFast.from_pretrained`
# does. For a list of models, qwen2 among them, the registered class replaces the one that the folder
# names, and brings its own pre-tokenizer. A model of Qwen2's shape with a tokenizer of its own then
# reads other tokens than in training: load its tokenizer by the general class.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/auto_tokenizer_qwen2.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    transformers==5.24.0 tokenizers==0.23.3

cat > "$folder/ids.py" <<'PROGRAM'
import json
import pathlib
import sys

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

text = "def add(a, b):\n    return a + b\n"
byte_level = tokenizers.Tokenizer(models.BPE())
byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
byte_level.decoder = decoders.ByteLevel()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
byte_level.train_from_iterator([text] * 10, trainer)

found = []
for kind in ("llama", "qwen2"):
    folder = pathlib.Path(sys.argv[1], kind)
    folder.mkdir()
    byte_level.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    own = byte_level.encode(text).ids
    general = PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]
    automatic = AutoTokenizer.from_pretrained(folder)
    found.append((kind, general == own, automatic(text)["input_ids"] == own))
    print(*found[-1], type(automatic).__name__)
assert found == [("llama", True, True), ("qwen2", True, False)]
PROGRAM
PYTHONPATH="$folder/packages" "$python" "$folder/ids.py" "$folder"
