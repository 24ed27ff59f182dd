"""Small tokenizers and a model folder for tests of the gateway's text side."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TOKENS = ["<tool_call>", "</tool_call>"]
LONGER_TOKEN = "<|im_end|>>"  # begins with another token
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps. " * 4,
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(1, 2))\n" * 4,
    "f(x)\ng(y)\n\nEnd.\nNext.\n\nIt is 1.\nIt is 2.\n" * 8,
    "Größe über Straßen, naïve café, 東京タワー, пример текста, 🙂🙃👩‍👩‍👧\n" * 4,
]


@cache
def byte_level(split: str = "gpt2", *, add_prefix_space: bool = False) -> Tokenizer:
    """Byte-level BPE of 600 entries. `split`: "gpt2", or "llama3" with that family's pattern and NFC."""
    tokenizer = Tokenizer(models.BPE())
    if split == "llama3":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token in [*TOOL_TOKENS, LONGER_TOKEN]]
    )
    return tokenizer


@cache
def byte_fallback(*, prepend_scheme: str = "first") -> Tokenizer:
    """Sentencepiece's kind, as Llama 2's: metaspaces, and byte tokens for what it does not know."""
    alphabet = sorted({char for text in _TEXT[:2] for char in text if char != "\n"} | {"▁"})
    vocabulary = {token: number for number, token in enumerate(["<unk>", *SPECIAL])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for char in alphabet:
        vocabulary.setdefault(char.replace(" ", "▁"), len(vocabulary))
    merges = []
    for left, right in (("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "d"), ("o", "g"), ("▁d", "og")):
        merges.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def make_model_dir(folder: Path, tokenizer: Tokenizer | None = None, **changes: object) -> Path:
    """A folder that ModelText loads. `changes` go to config.json."""
    tokenizer = tokenizer or byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size() + 8,  # padded, as real models are
        "eos_token_id": [2, 0],
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "pad_token": {"content": "<|endoftext|>"}})
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
