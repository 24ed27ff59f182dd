"""Train the tokenizer and pack the corpus: `python -m deploy.models.train_tokenizer --corpus .quire/train`.

Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json into --model,
and `corpus.npz` beside the corpus: uint16 token ids, chats rendered with the model's own chat_template.jinja.
The top bit of an id says "no loss here": everything in a chat that the assistant does not say.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
NO_LOSS_BIT = 0x8000
VOCABULARY = 4096
MAX_POSITIONS = 4096
_ASSISTANT_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)


def load_template(path: Path) -> jinja2.Template:
    """The chat template in the sandbox settings that inference uses (JSON keys keep their order)."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(path.read_text("utf-8"))


def train(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of 4096 tokens; digits stand alone so that numbers can be copied and added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Tool-call tokens are special to the trainer only: decoders must not drop them, parsers read them.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*CONTROL_TOKENS, *TOOL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(raw))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """The files that vLLM, transformers and the gateway read."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in CONTROL_TOKENS,
        }
        for token in (*CONTROL_TOKENS, *TOOL_TOKENS)
    }  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "bos_token": None,
            "unk_token": None,
            "added_tokens_decoder": added,
        },
    )
    _write_json(folder / "special_tokens_map.json", {"eos_token": TURN_END, "pad_token": END_OF_TEXT})
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(
        folder / "generation_config.json",
        {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "eos_token_id": ends, "pad_token_id": ends[1]},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def chat_pieces(rendered: str) -> Iterator[tuple[str, bool]]:
    """A rendered chat cut into (text, with loss?): the assistant's words and their end token have loss."""
    position = 0
    for match in _ASSISTANT_TURN.finditer(rendered):
        yield rendered[position : match.start()], False
        yield match.group(), True
        position = match.end()
    yield rendered[position:], False


def encode_chat(tokenizer: Tokenizer, rendered: str) -> np.ndarray:
    """uint16 ids of one chat, END_OF_TEXT last, the no-loss bit set where the assistant does not speak."""
    whole: list[np.ndarray] = []
    for text, with_loss in chat_pieces(rendered):
        ids = np.asarray(tokenizer.encode(text).ids, dtype=np.uint16)
        whole.append(ids if with_loss else ids | NO_LOSS_BIT)
    end = tokenizer.encode(END_OF_TEXT).ids[0]
    whole.append(np.asarray([end | NO_LOSS_BIT], dtype=np.uint16))
    return np.concatenate(whole)


def pack(tokenizer: Tokenizer, documents: list[str], chats: list[str], seed: int) -> dict[str, np.ndarray]:
    """`train` and `held_out` id streams: documents and chats shuffled together, every 100th item held out."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    items = [
        np.asarray([*encoded.ids, end], dtype=np.uint16) for encoded in tokenizer.encode_batch(documents)
    ]
    items += [encode_chat(tokenizer, chat) for chat in chats]
    random.Random(seed).shuffle(items)
    held_out = items[::100]
    kept = [item for index, item in enumerate(items) if index % 100]
    return {"train": np.concatenate(kept), "held_out": np.concatenate(held_out)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer and pack the corpus.")
    parser.add_argument("--corpus", type=Path, default=Path(".quire/train"))
    parser.add_argument("--model", type=Path, default=Path("deploy/models/quire-demo"))
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    template = load_template(args.model / "chat_template.jinja")
    documents = [
        json.loads(line)["text"] for line in (args.corpus / "documents.jsonl").open(encoding="utf-8")
    ]
    rows = [json.loads(line) for line in (args.corpus / "chats.jsonl").open(encoding="utf-8")]
    chats = [template.render(messages=row["messages"], tools=row["tools"]) for row in rows]
    tokenizer = train(iter([*documents, *chats[::3]]))
    write_tokenizer(tokenizer, args.model)
    streams = pack(tokenizer, documents, chats, args.seed)
    out = args.corpus / "corpus.npz"
    np.savez_compressed(out, train=streams["train"], held_out=streams["held_out"])
    loss_share = float(np.mean(streams["train"] < NO_LOSS_BIT))
    print(
        f"{out}: {len(streams['train'])} tokens to train on ({loss_share:.0%} with loss), "
        f"{len(streams['held_out'])} held out, {out.stat().st_size / 1e6:.1f} MB, "
        f"vocabulary {tokenizer.get_vocab_size()}"
    )


if __name__ == "__main__":
    main()
