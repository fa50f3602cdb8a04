"""The tokenizer and chat template of one checkpoint folder: tokenizer.json, tokenizer_config.json and the chat template, each read
on first use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from config.chat_templates import is_template_text
from daemon.errors import BadRequest
from daemon.text.chat_template import ChatTemplate
from daemon.text.fill_in_middle import fill_in_middle
from daemon.text.jobs import EncodePairs, TextFacts
from daemon.text.reasoning import TAGS, detect_reasoning
from daemon.text.table_builder import build_table, read_tokenizer_file, unsupported
from daemon.text.token_lower_bound import TokenLowerBound
from daemon.text.token_table import PackedTable
from daemon.text.tool_parsers.harmony import marks_of
from daemon.text.tool_parsers.registry import MARKERS, detect_tools
from loader.files.regular_file import read_regular

MAX_TOKENIZER_BYTES = 256 << 20  # the largest in use have about 35 MB
MAX_TEXT_FILE_BYTES = 32 << 20  # the limit for templates and the small JSON files


class CheckpointText:
    """The tokenizer and chat template of one model. name: the model's name, for error messages. chat_template: a template, or the
    path of a template file, that replaces the checkpoint's own. The methods raise BadRequest naming the file that is missing or
    wrong."""

    def __init__(self, name: str, path: str, chat_template: str | None) -> None:
        self._name, self._folder, self._override = name, Path(path), chat_template
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._lower_bound: TokenLowerBound | None = None

    def table(self) -> PackedTable:
        file = self._folder / "tokenizer.json"
        contents = read_tokenizer_file(self._read(file, MAX_TOKENIZER_BYTES), str(file))
        return build_table(contents, str(file), lambda ids: self.tokenizer().decode(ids))

    def encode(
        self, texts: list[str], add_special_tokens: bool, keep_last: int = 0, suffix: str = "", keep_first: int = 0
    ) -> list[list[int]]:
        """Returns the token ids of each text. keep_last: the number of tokens to keep at each text's end, special tokens included;
        keep_first: the same for its beginning; 0: all. suffix: for filling in the middle, the text after the gap; "": none. Raises
        BadRequest if keep_last leaves no room for the text's own tokens, or the tokenizer cannot mark a gap."""
        tokenizer = self.tokenizer()
        if suffix:
            first = tokenizer.encode("").ids if add_special_tokens else []
            return [first + ids for ids in fill_in_middle(tokenizer, self._name, texts, suffix)]
        if keep_last:
            return self._encode_cut(texts, add_special_tokens, keep_last, "left")
        found = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        for at, ids in enumerate(found):
            if keep_first and len(ids) > keep_first:
                (found[at],) = self._encode_cut([texts[at]], add_special_tokens, keep_first, "right")
        return found

    def _encode_cut(self, texts: list[str], add_special_tokens: bool, keep: int, side: str) -> list[list[int]]:
        tokenizer = self.tokenizer()
        num_special = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        if keep <= num_special:
            message = f"truncate_prompt_tokens: {keep} leave no room beside the {num_special} special tokens of {self._name}"
            raise BadRequest("invalid_request", message, param="truncate_prompt_tokens")
        found = []
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            encoding.truncate(keep - num_special, direction=side)
            found.append(tokenizer.post_process(encoding, None, add_special_tokens).ids)
        return found

    def encode_pairs(self, firsts: list[str], seconds: list[str], job: EncodePairs) -> Iterator[tuple[int, list[int]]]:
        """Yields for each pair of texts the index at which the segment of its second text begins (0: it has none), and the pair's
        token ids. firsts, seconds: the decoded texts of `job`; one first text serves all pairs. Raises BadRequest if a first text
        leaves no room for a second one."""
        tokenizer = self.tokenizer()
        num_special = tokenizer.num_special_tokens_to_add(True)
        heads = tokenizer.encode_batch(firsts, add_special_tokens=False)
        most = job.keep or job.max_tokens
        for at, head in enumerate(heads):
            if most and len(head.ids) + num_special + bool(job.keep) > most:
                field = job.fields[0] if len(firsts) == 1 else f"{job.fields[0]}[{at}]"
                limit = f"the {most} of {'truncate_prompt_tokens' if job.keep else 'max_model_len'}"
                message = f"{field} has {len(head.ids)} tokens, which with {num_special} special ones leave no room in {limit}"
                raise BadRequest("context_length_exceeded", message, param=field)
        for at, tail in enumerate(tokenizer.encode_batch(seconds, add_special_tokens=False)):
            head = heads[at if len(heads) > 1 else 0]
            room = [job.keep_second] if job.keep_second else []
            room += [job.keep - num_special - len(head.ids)] if job.keep else []
            if room:
                tail.truncate(min(room))
            joined = tokenizer.post_process(head, tail, True)
            kinds = joined.type_ids
            begin = kinds.index(1) if 1 in kinds else 0
            # without a template the texts are only joined, and then post_process gives all tokens the same type
            yield (len(head.ids) if tokenizer.post_processor is None else begin), joined.ids

    def token_lower_bound(self, text: str) -> tuple[int, str]:
        """Returns a number of tokens that the text has at least, and an explanation of that number for an error message; (0, "") if
        the tokenizer allows no bound. The TokenLowerBound that computes it is built on first use."""
        if self._lower_bound is None:
            self._lower_bound = TokenLowerBound(self.tokenizer())
        return self._lower_bound.of(text)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> str:
        if self._template is None:
            self._template = ChatTemplate(self._template_source(), self._special_tokens())
        return self._template.render(messages, add_generation_prompt, kwargs, tools, documents)

    def facts(self) -> TextFacts:
        """Returns how a model's replies are to be parsed: the dialects of tool calls and of reasoning, and the special tokens that
        mark them, as the chat template, config.json and the tokenizer show them. A file that cannot be read counts as empty here;
        the request that needs it reports the error."""
        template, model_type, markers, harmony_marks = "", "", {}, {}
        with contextlib.suppress(BadRequest):
            template = self._template_source()
        with contextlib.suppress(BadRequest):
            model_type = str(self._json(self._folder / "config.json").get("model_type", ""))
        with contextlib.suppress(BadRequest):
            added = self.tokenizer().get_added_tokens_decoder()
            shown = MARKERS | TAGS
            markers = {token_id: token.content for token_id, token in added.items() if token.special and token.content in shown}
            harmony_marks = marks_of({token_id: token.content for token_id, token in added.items()})
        return TextFacts(detect_tools(template, model_type), detect_reasoning(template), markers, harmony_marks)

    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            file = self._folder / "tokenizer.json"
            data = self._read(file, MAX_TOKENIZER_BYTES)
            try:
                tokenizer = Tokenizer.from_buffer(data)
            except Exception as error:  # the library raises bare Exception
                raise unsupported(f"{file}: {error}") from None
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self._tokenizer = tokenizer
        return self._tokenizer

    def _read(self, file: Path, most_bytes: int = MAX_TEXT_FILE_BYTES) -> bytes:
        try:
            return read_regular(file, most_bytes)
        except OSError as error:
            raise unsupported(f"model {self._name}: {file} cannot be read: {error.strerror}") from None

    def _text_of(self, file: Path) -> str:
        try:
            return self._read(file).decode()
        except UnicodeDecodeError as error:
            raise unsupported(f"model {self._name}: {file} is no UTF-8 text: {error}") from None

    def _template_source(self) -> str:
        if self._override is not None:
            if is_template_text(self._override):
                return self._override
            return self._text_of(Path(self._override))
        plain = self._folder / "chat_template.jinja"
        if plain.exists():
            return self._text_of(plain)
        for file in (self._folder / "chat_template.json", self._folder / "tokenizer_config.json"):
            source = _default_template(self._json(file).get("chat_template"))
            if source is not None:
                return source
        if not (self._folder / "tokenizer.json").exists():
            raise unsupported(f"model {self._name} has no tokenizer.json in {self._folder}: copy it there from where it came from")
        raise BadRequest(
            "no_chat_template",
            f"model {self._name} has no chat template; use /v1/completions with a plain prompt",
            param="messages",
        )

    def _special_tokens(self) -> dict[str, str]:
        """Returns the special tokens by the names that templates use for them: bos_token, eos_token …"""
        tokens = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, value in self._json(self._folder / file).items():
                content = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(content, str):
                    tokens[key] = content
        return tokens

    def _json(self, file: Path) -> dict[str, Any]:
        """Reads a JSON object from a file. Returns {} if there is no such file or it holds no object. Raises BadRequest if it is
        not valid JSON."""
        if not file.exists():
            return {}
        try:
            value = json.loads(self._read(file))
        except ValueError as error:
            raise unsupported(f"{file}: {error}") from None
        except RecursionError:
            raise unsupported(f"{file}: its JSON is nested too deeply") from None
        return value if isinstance(value, dict) else {}


def _default_template(value: object) -> str | None:
    """Returns the template in `value`, the setting chat_template of a JSON file: a string, or a list of named templates, of which
    the one named "default" is used. None if there is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        source = named.get("default")
        return source if isinstance(source, str) else None
    return None
