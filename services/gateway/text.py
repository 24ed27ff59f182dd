"""Text of one model: chat template, tokenizer, end tokens. From the model's folder; no torch, no vLLM."""

import asyncio
import json
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from services.gateway.chat_template import ChatTemplate
from services.gateway.detokenize import Detokenizer, TokenTexts
from services.gateway.segment_cache import SegmentCache, borders_of
from services.gateway.word_ids import words_of
from shared.errors import InvalidRequest, PromptTooLong, SettingsError
from shared.kv import model_files
from shared.kv.block_hash import pack_tokens
from shared.kv.packed_ids import largest_id
from shared.observe.log import get_logger

# New text of this length takes 0.2 ms on one core of a laptop, a thread's round trip 0.03 to 0.25 ms.
INLINE_CHARS = 1024
INLINE_TOKENS = 1024  # decoded or named in 0.4 ms
CACHE_BYTES = 32 << 20
THREADS = 1
LONG = 64 << 10  # characters or tokens
NORMALIZER_SHRINKS = 4  # at most, in characters
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_log = get_logger("gateway.text")
Result = TypeVar("Result")


class ModelText:
    """Everything between a chat and token ids. One event loop owns it.

    Args: threads: for long texts; cache_bytes: for the ids of pieces seen before, 0 for none.
    Raises (constructor): SettingsError when the folder lacks tokenizer.json or config.json, or they are broken.
    """

    def __init__(
        self, model_dir: str | Path, *, threads: int = THREADS, cache_bytes: int = CACHE_BYTES
    ) -> None:
        folder = Path(model_dir)
        self.folder = folder
        self.config = model_files.read_config(str(folder))
        self.generation_config = _read_json(folder / "generation_config.json")
        self.tokenizer = _load_tokenizer(folder / "tokenizer.json")
        known = self.config.get("vocab_size")
        self.vocab_size: int = known if isinstance(known, int) else self.tokenizer.get_vocab_size()
        self.eos_token_ids = model_files.eos_token_ids(str(folder))
        self.texts = TokenTexts(self.tokenizer)
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        named = _find_templates(folder, tokenizer_config)
        plain = named.get("default") or next(iter(named.values()), "")
        self.tool_template_source = named.get("tool_use") or plain
        special = _special_tokens(tokenizer_config)
        self._template = ChatTemplate(plain, special) if plain else None
        self._tool_template = self._template
        if self.tool_template_source != plain:
            self._tool_template = ChatTemplate(self.tool_template_source, special)
        self.cache = SegmentCache(cache_bytes)
        self._borders = borders_of(self.tokenizer) if cache_bytes else None
        self._words = words_of(self.tokenizer) if self._borders is not None else None
        self._frames = _frames(self.tokenizer)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="long")
        self._check_borders()

    # -- chats ----------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The model's own template over the messages, with tools its `tool_use`; see ChatTemplate.render().

        Raises: InvalidRequest when there is no template, or the template refuses the messages.
        """
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            extra=extra,
        )

    # -- tokens ---------------------------------------------------------------------------------------

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int = 0, param: str = "messages"
    ) -> "array[int]":
        """Token ids (u32). Text that was not seen before is tokenized on a thread when it is long.

        Args:
            max_tokens: refuse text that cannot have so few tokens without tokenizing it; 0: never.
            param: the body's field that the text comes from.
        Raises: PromptTooLong.
        """
        if max_tokens and (least := self.least_tokens(text)) > max_tokens:
            raise PromptTooLong(
                f"This model's maximum context length is {max_tokens} tokens. However, your prompt has "
                f"{len(text)} characters, which cannot be fewer than {least} tokens. Please reduce its length.",
                param=param,
            )
        found, missing = self._look_up(text)
        if missing:
            if (num_chars := sum(map(len, missing))) <= INLINE_CHARS:
                fresh = self._tokenize_here(missing)
            else:
                fresh = await self.beside(num_chars, self._tokenize, missing)
            self._fill(found, missing, fresh)
        return self._join(found, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least, by its length alone; 0 with a tokenizer that says no token's bytes."""
        table = self.texts.table
        if table is None:
            return 0
        longest = table.longest_bytes * (NORMALIZER_SHRINKS if self.tokenizer.normalizer else 1)
        return -(-len(text) // longest)

    @property
    def num_before(self) -> int:
        """Tokens that add_special_tokens puts before a text."""
        return len(self._frames[0])

    def encode_now(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """The same without a thread."""
        found, missing = self._look_up(text)
        if missing:
            self._fill(found, missing, self._tokenize_here(missing))
        return self._join(found, add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these tokens, of many on a thread. Raises: InvalidRequest on an id outside the vocabulary."""
        self.pack_token_ids(token_ids, "tokens")
        ids = list(token_ids)
        if len(ids) <= INLINE_TOKENS:
            return self._decode(ids, skip_special_tokens)
        return await self.beside(len(ids), self._decode, ids, skip_special_tokens)

    async def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Each token as the vocabulary spells it, None for an id without one; of many on a thread."""
        if len(token_ids) <= INLINE_TOKENS:
            return self._names(token_ids)
        return await self.beside(len(token_ids), self._names, token_ids)

    def beside(self, size: int, work: Callable[..., Result], *args: Any) -> "asyncio.Future[Result]":
        """Work on a thread. What is LONG has its own, as many: no usual prompt waits for it."""
        threads = self._long if size > LONG else self._threads
        return asyncio.get_running_loop().run_in_executor(threads, work, *args)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        show_tool_tokens: bool = False,
    ) -> Detokenizer:
        """A new detokenizer for one choice of this prompt; see ByteDetokenizer."""
        return self.texts.detokenizer(
            prompt_token_ids, skip_special_tokens=skip_special_tokens, show_tool_tokens=show_tool_tokens
        )

    def pack_token_ids(self, token_ids: Sequence[int], param: str) -> bytes:
        """See pack_tokens(). Raises: InvalidRequest on an id outside the vocabulary."""
        try:
            packed = pack_tokens(token_ids)  # which refuses negative ones
        except OverflowError:
            packed = b""
        if token_ids and not (packed and largest_id(packed) < self.vocab_size):
            raise InvalidRequest(
                f"Invalid value for '{param}': token ids are 0 to {self.vocab_size - 1}.", param=param
            )
        return packed

    def close(self) -> None:
        """Ends the threads."""
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- inside ---------------------------------------------------------------------------------------

    def _look_up(self, text: str) -> "tuple[list[array[int] | str], list[str]]":
        """Ids of the pieces that are known, texts of the others in their place, and those texts once each."""
        borders = self._borders
        if borders is None:
            return [text], [text] if text else []
        found: list[array[int] | str] = []
        missing: dict[str, None] = {}
        for place, piece in enumerate(borders.split(text)):
            if place % 2:
                found.append(borders.ids[piece])
            elif piece:
                for part in borders.cut(piece) if len(piece) > borders.chunk_chars else (piece,):
                    ids = self.cache.get(part)
                    if ids is None:
                        missing[part] = None
                    found.append(part if ids is None else ids)
        return found, list(missing)

    def _tokenize_here(self, pieces: list[str]) -> "list[array[int]]":
        """Short ones, one by one: a batch of two goes to the library's own threads, at up to twice the CPU."""
        words = self._words
        return [
            words.ids(piece) if words is not None and piece.isascii() else self._tokenize([piece])[0]
            for piece in pieces
        ]

    def _tokenize(self, pieces: list[str]) -> "list[array[int]]":
        # The batch call lets go of the interpreter lock, encode() does not.
        return [
            array("I", encoding.ids)
            for encoding in self.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        # a batch for the same reason
        return self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def _names(self, ids: Sequence[int]) -> list[str | None]:
        return [self.tokenizer.id_to_token(each) for each in ids]

    def _fill(self, found: "list[array[int] | str]", missing: list[str], fresh: "list[array[int]]") -> None:
        known = dict(zip(missing, fresh, strict=True))
        found[:] = [known[each] if isinstance(each, str) else each for each in found]
        if self._borders is not None:
            for piece, ids in known.items():
                self.cache.put(piece, ids)

    def _join(self, found: "list[array[int] | str]", add_special_tokens: bool) -> "array[int]":
        before, after = self._frames if add_special_tokens else ((), ())
        out = array("I", before)
        for ids in found:
            assert not isinstance(ids, str) or not ids, "every piece has been filled in"
            if not isinstance(ids, str):
                out += ids
        out.extend(after)
        return out

    def _check_borders(self) -> None:
        """A tokenizer that the rules of borders_of() misjudge loses its cache, not its correctness."""
        if self._borders is None:
            return
        tokens = list(self._borders.ids)[:8]
        sample = "".join(f"{token}user\n Grüße, {token}  x1\n\n{token}" for token in tokens) + " end "
        plain = self.tokenizer.encode(sample, add_special_tokens=False).ids
        if self.encode_now(sample, add_special_tokens=False).tolist() != plain:
            _log.warning("tokenizer_not_cached", model=str(self.folder))
            self._borders = self._words = None


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise SettingsError(f"cannot load {path}: {error}") from error
    tokenizer.no_truncation()  # the files of some models still have what their training used
    tokenizer.no_padding()
    return tokenizer


def _frames(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that add_special_tokens puts before and after a text, whatever the text is."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    for at in range(len(framed) - len(plain) + 1):
        if framed[at : at + len(plain)] == plain:
            return framed[:at], framed[at + len(plain) :]
    raise SettingsError(
        "the tokenizer's post-processor changes the text's own tokens, which Quire does not know"
    )


def _find_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """By name, as transformers finds them: files come before what the tokenizer's settings hold."""
    found = tokenizer_config.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    path = folder / "chat_template.jinja"
    if path.is_file():
        found = {"default": path.read_text()}
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return found | {file.stem: file.read_text() for file in files}


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Names that templates may print; a token is text or an object with the text as `content`."""
    out = {}
    for key in _SPECIAL_KEYS:
        value = tokenizer_config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            out[key] = value
    return out


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise SettingsError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path} is no JSON object")
    return found
