"""What the text helper makes of a prompt that is cut, continued or filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, processors

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.fill_in_middle import _FAMILIES, fill_in_middle
from daemon.text.job_parts import rendered
from tests.daemon.text.tokenizers_made import CHATML, byte_fallback, byte_level, checkpoint


def with_specials(tokenizer: Tokenizer) -> Tokenizer:
    start, end = (tokenizer.token_to_id(each) for each in ("<|start|>", "<|end|>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|start|> $A <|end|>", "<|start|> $A <|end|> $B <|end|>", [("<|start|>", start), ("<|end|>", end)]
    )
    return tokenizer


def text_of(folder: Path, tokenizer: Tokenizer, **config: object) -> CheckpointText:
    return CheckpointText("tiny", str(checkpoint(folder, tokenizer, **config)), None)


def test_the_end_of_a_text_is_kept_beside_special_tokens(tmp_path: Path) -> None:
    tokenizer = with_specials(byte_level())
    text = text_of(tmp_path, tokenizer)
    long, short = "The quick brown fox jumps over the lazy dog", "fox"
    plain = [tokenizer.encode(each, add_special_tokens=False).ids for each in (long, short)]
    assert text.encode([long, short], False, keep_last=4) == [plain[0][-4:], plain[1][-4:]]
    start, end = (tokenizer.token_to_id(each) for each in ("<|start|>", "<|end|>"))
    assert text.encode([long, short], True, keep_last=6) == [[start, *ids[-4:], end] for ids in plain]
    assert text.encode([long], True, keep_last=1000) == text.encode([long], True)
    with pytest.raises(BadRequest, match="truncate_prompt_tokens: 2 leave no room beside the 2 special tokens of tiny"):
        text.encode([long], True, keep_last=2)


def test_the_beginning_of_a_text_is_kept_beside_special_tokens(tmp_path: Path) -> None:
    tokenizer = with_specials(byte_level())
    text = text_of(tmp_path, tokenizer)
    long, short = "The quick brown fox jumps over the lazy dog", "fox"
    plain = [tokenizer.encode(each, add_special_tokens=False).ids for each in (long, short)]
    start, end = (tokenizer.token_to_id(each) for each in ("<|start|>", "<|end|>"))
    assert text.encode([long, short], True, keep_first=6) == [[start, *ids[:4], end] for ids in plain]
    assert text.encode([long, short], False, keep_first=4) == [ids[:4] for ids in plain]


def chat(text: CheckpointText, last: str, **options: object) -> str:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]
    return rendered(text, msgspec.msgpack.encode(messages), options)


@pytest.mark.parametrize("last", ["The sky", "The sky ", "<think>well", "a<|end|>\n", "\n"])
def test_a_continued_message_ends_where_its_text_does(tmp_path: Path, last: str) -> None:
    text = text_of(tmp_path, byte_level(), chat_template=CHATML)
    told = chat(text, last, continue_final_message="answer", add_generation_prompt=False)
    assert told == f"<|start|>user\nhi<|end|>\n<|start|>assistant\n{last}"
    assert chat(text, last, add_generation_prompt=False) == told + "<|end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
        "{{ messages[1].content | upper }}",
    ],
)
def test_a_template_that_does_not_write_the_text_once_is_refused(tmp_path: Path, template: str) -> None:
    text = text_of(tmp_path, byte_level(), chat_template=template)
    with pytest.raises(BadRequest, match="continue_final_message: the chat template does not write") as error:
        chat(text, "abc", continue_final_message="answer")
    assert error.value.param == "continue_final_message"


@pytest.mark.parametrize("family", _FAMILIES, ids=lambda family: family.prefix)
def test_the_families_order(tmp_path: Path, family: Any) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([each for each in family if each])
    before, after = (tokenizer.encode(each).ids for each in ("def f(", "return x"))
    prefix, suffix, middle = (tokenizer.token_to_id(each) if each else None for each in family)
    wanted = [suffix, *after, prefix, *before] if middle is None else [prefix, *before, suffix, *after, middle]
    assert fill_in_middle(tokenizer, "tiny", ["def f("], "return x") == [wanted]
    assert text_of(tmp_path / "plain", tokenizer).encode(["def f("], True, suffix="return x") == [wanted]


def test_the_beginning_token_comes_first(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", tokenizer.token_to_id("<s>"))])
    (ids,) = text_of(tmp_path, tokenizer).encode(["a"], True, suffix="b")
    assert ids[:2] == [tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁<PRE>")]
    (ids,) = text_of(tmp_path, tokenizer).encode(["a"], False, suffix="b")
    assert ids[0] == tokenizer.token_to_id("▁<PRE>")


def test_a_tokenizer_without_such_tokens_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="suffix: the tokenizer of tiny has no tokens for filling in the middle") as error:
        text_of(tmp_path, byte_level()).encode(["a"], True, suffix="b")
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "suffix")
