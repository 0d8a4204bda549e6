"""What `transformers` makes and reads, in an environment of its own:

python with_transformers.py make FOLDER     small models with random parameters
python with_transformers.py read FOLDER...  the logits of each model, and the tokens of a text
"""

import json
import pathlib
import sys

import torch
import transformers

TEXT = "def add(a, b):\n    return a + b  # é\n"
SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=44, num_hidden_layers=3)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SIZES |= dict(max_position_embeddings=64, rope_theta=5e5, bos_token_id=0, eos_token_id=0)
LLAMA31 = dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
LLAMA31 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = dict(rope_type="linear", factor=4.0)
WIDE = SIZES | dict(head_dim=12)
OF_GPT2 = dict(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=16)
CONFIGS = dict(
    llama=transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5),
    llama31=transformers.LlamaConfig(**SIZES, rope_scaling=LLAMA31),
    linear=transformers.LlamaConfig(**SIZES, rope_scaling=LINEAR),
    mistral=transformers.MistralConfig(**SIZES, sliding_window=5),
    qwen2=transformers.Qwen2Config(**{n: x for n, x in SIZES.items() if n != "head_dim"}),
    tied=transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    qwen3=transformers.Qwen3Config(**SIZES),
    wide=transformers.Qwen3Config(**WIDE),
    gpt2=transformers.GPT2Config(**OF_GPT2, bos_token_id=0, eos_token_id=0),
)


def make(top):
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases, too
                parameter.add_(0.2 * torch.randn_like(parameter))
        # so small that a model lies in several files
        model.save_pretrained(top / name, max_shard_size="20KB" if name == "llama" else "1GB")


def read(folder):
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = found
    tokens = torch.tensor([[(7 * i + 3 * row) % 48 for i in range(12)] for row in range(2)])
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    answer = dict(tokens=tokens.tolist(), logits=logits.tolist(), dtype=str(logits.dtype))
    answer["problems"] = [len(report[kind]) for kind in ("missing_keys", "unexpected_keys")]
    if (folder / "tokenizer.json").exists():
        # AutoTokenizer splits a Qwen2's text as Qwen does, whatever tokenizer.json says.
        of_qwen2 = model.config.model_type == "qwen2"
        kind = transformers.PreTrainedTokenizerFast if of_qwen2 else transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(folder)
        answer["text"] = TEXT
        answer["ids"] = tokenizer(TEXT, add_special_tokens=False).input_ids
        answer["end"] = tokenizer.eos_token_id
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    for each in map(pathlib.Path, folders):
        make(each) if what == "make" else read(each)
