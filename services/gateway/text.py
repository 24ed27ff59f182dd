"""Text of one model: chat template, tokenizer, end tokens. Loaded from the model's folder; no torch, no vLLM.

Long inputs are tokenized on a few threads (the tokenizer releases the GIL) and cut at special tokens, whose
borders no merge crosses; the ids of every piece are cached, so a chat's next turn tokenizes only what is new.
"""

import asyncio
import datetime
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.gateway.detokenize import TokenTexts
from shared.errors import InvalidRequest, SettingsError

INLINE_CHARS = 2048  # below this a thread switch costs more than the work
CACHE_CHARS = 16 << 20
MAX_RENDERED_CHARS = 8 << 20
THREADS = 2


class ModelText:
    """Everything between a chat and token ids. Safe to share between tasks of one loop.

    Raises (constructor): SettingsError when the folder lacks tokenizer.json or config.json.
    """

    def __init__(self, model_dir: str | Path) -> None:
        folder = Path(model_dir)
        self.folder = folder
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        except Exception as error:  # tokenizers raises bare Exception
            raise SettingsError(
                f"model_dir {folder}: {error}; it must hold tokenizer.json and config.json"
            ) from error
        self._tokenizer_config = _read_json(folder / "tokenizer_config.json")
        self.generation_config = _read_json(folder / "generation_config.json")
        self.vocab_size: int = int(self.config.get("vocab_size") or self.tokenizer.get_vocab_size())
        self.eos_token_ids = self._find_eos()
        self.texts = TokenTexts(self.tokenizer)
        self.template_source = self._find_template()
        self._template = _compile(self.template_source) if self.template_source else None
        self._cuts = self._special_pattern()
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_chars = 0
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    # -- chats ----------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The model's own template over the messages.

        Raises: InvalidRequest when there is no template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        variables: dict[str, Any] = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens(),
            **(extra or {}),
        }
        out: list[str] = []
        total = 0
        try:
            for piece in self._template.generate(**variables):
                total += len(piece)
                if total > MAX_RENDERED_CHARS:
                    raise InvalidRequest("the rendered chat is too long", param="messages")
                out.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"chat template cannot render these messages: {error}", param="messages"
            ) from error
        return "".join(out)

    # -- tokens ---------------------------------------------------------------------------------------

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; long texts on a thread."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        if self._cuts is None or add_special_tokens:
            return await loop.run_in_executor(self._threads, self._plain, text, add_special_tokens)
        pieces = self._cuts.split(text)
        missing = [p for p in dict.fromkeys(pieces) if p and p not in self._cache]
        if missing:
            found = await loop.run_in_executor(self._threads, self._plain_many, missing)
            for piece, ids in zip(missing, found, strict=True):
                self._remember(piece, ids)
            return self._join(pieces, dict(zip(missing, found, strict=True)))
        return self._join(pieces, {})

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same without a thread."""
        if self._cuts is None or add_special_tokens:
            return self._plain(text, add_special_tokens)
        pieces = self._cuts.split(text)
        for piece in pieces:
            if piece and piece not in self._cache:
                self._remember(piece, self._plain(piece, False))
        return self._join(pieces, {})

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these tokens. Raises: InvalidRequest on an id outside the vocabulary."""
        self.check_token_ids(token_ids, "tokens")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises: InvalidRequest on an id outside the vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            raise InvalidRequest(f"token ids must be 0 to {self.vocab_size - 1}", param=param)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- inside ---------------------------------------------------------------------------------------

    def _plain(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def _plain_many(self, texts: list[str]) -> list[list[int]]:
        return [self._plain(text, False) for text in texts]

    def _join(self, pieces: list[str], fresh: dict[str, list[int]]) -> list[int]:
        out: list[int] = []
        for piece in pieces:
            if not piece:
                continue
            ids = self._cache.get(piece)
            if ids is None:
                ids = fresh.get(piece) or self._plain(piece, False)  # evicted in between
            else:
                self._cache.move_to_end(piece)
            out += ids
        return out

    def _remember(self, piece: str, ids: list[int]) -> None:
        if len(piece) > CACHE_CHARS or piece in self._cache:
            return
        self._cache[piece] = ids
        self._cached_chars += len(piece)
        while self._cached_chars > CACHE_CHARS:
            old, _ = self._cache.popitem(last=False)
            self._cached_chars -= len(old)

    def _special_pattern(self) -> re.Pattern[str] | None:
        """Splits at special tokens, which stay as pieces. None: this tokenizer has no safe borders."""
        data = json.loads(self.tokenizer.to_str())
        plain = [
            token["content"]
            for token in data.get("added_tokens", [])
            if not token.get("lstrip") and not token.get("rstrip") and not token.get("single_word")
        ]
        pre = json.dumps(data.get("pre_tokenizer") or {}) + json.dumps(data.get("normalizer") or {})
        # with a prefix space or a metaspace a piece's first token depends on what stands before it
        if not plain or '"add_prefix_space": true' in pre or "Metaspace" in pre or '"Prepend"' in pre:
            return None
        longest_first = sorted(plain, key=len, reverse=True)
        return re.compile("(" + "|".join(re.escape(token) for token in longest_first) + ")")

    def _find_eos(self) -> list[int]:
        found = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return []
        return [int(each) for each in found] if isinstance(found, list) else [int(found)]

    def _find_template(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text()
        found = self._tokenizer_config.get("chat_template")
        if isinstance(found, list):
            named = {each["name"]: each["template"] for each in found}
            return named.get("default") or next(iter(named.values()), None)
        return found

    def _special_tokens(self) -> dict[str, str]:
        out = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._tokenizer_config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                out[key] = value
        return out


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _compile(source: str) -> jinja2.Template:
    """The sandbox and helpers that Hugging Face's templates expect."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)  # noqa: DTZ005
    return environment.from_string(source)
