"""Which model a name stands for: patterns, fallbacks, rights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from config.schema import ModelConfig, NodeConfig
from daemon.errors import BadRequest, HearthError, NotNow, no_model
from daemon.models.entry import ModelEntry
from daemon.models.model_names import ModelNames
from daemon.models.name_table import MAX_MATCHED, NameTable
from tests.daemon.api.fakes import entry


@dataclass
class Tenant:
    models: tuple[str, ...]
    name: str = "ann"

    def may_use(self, model: str) -> bool:
        return model in self.models


def names(
    table: dict[str, list[str]],
    models: tuple[str, ...] = ("a", "b", "c"),
    refusals: dict[str, HearthError] | None = None,
    full: tuple[str, ...] = (),
    **settings: ModelConfig,
) -> ModelNames:
    """refusals: what cannot be served, by model. full: models whose queue is full."""

    def served(name: str) -> ModelEntry | HearthError:
        if name not in models:
            return no_model(name)
        return (refusals or {}).get(name) or entry(name, aliases=tuple(settings.get(name, ModelConfig()).aliases))

    def turned_away(name: str, tenant: str) -> HearthError | None:
        return NotNow("queue_full", f"{name} is full", status=429, retry_after_s=3.0) if name in full else None

    return ModelNames(NodeConfig(names=table, models=settings), models, served, turned_away)


def refused(found: ModelNames, name: str, *asker: Tenant) -> HearthError:
    with pytest.raises(HearthError) as caught:
        found.resolve(name, *asker)
    return caught.value


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("gpt-4o-mini", "gpt-4o*"),
        ("gpt-4", "gpt-4*"),
        ("gpt-4/x", "gpt-4*"),
        ("gpt-5", "gpt-?"),
        ("gpt-", "*"),
        ("gpt-4-exact", "gpt-4-exact"),
        ("text-mini", "*-mini"),
        ("[x]", "[x]*"),
        ("x", "*"),
        ("x" * MAX_MATCHED, "*"),
        ("x" * (MAX_MATCHED + 1), None),
        ("gpt-4*", "gpt-4*"),
    ],
)
def test_the_most_specific_pattern_wins(name: str, met: str | None) -> None:
    entries = ("*", "gpt-?", "gpt-4*", "gpt-4o*", "gpt-4-exact", "*-mini", "[x]*")
    assert NameTable({each: ["m"] for each in entries}).entry(name) == met
    assert NameTable({}).entry(name) is None


def test_of_equally_specific_patterns_the_first_in_the_file_wins() -> None:
    assert NameTable({"a*": ["m"], "*b": ["n"]}).entry("ab") == "a*"
    assert NameTable({"*b": ["n"], "a*": ["m"]}).entry("ab") == "*b"


def test_a_long_name_against_many_wildcards_takes_no_time() -> None:
    table = NameTable({"*a" * 20 + "*b": ["m"]})
    assert table.entry("a" * MAX_MATCHED) is None


def test_models_and_aliases_come_before_the_table() -> None:
    found = names({"*": ["c"]}, a=ModelConfig(aliases=["short"]), away=ModelConfig(aliases=["gone"]))
    assert [found.resolve(each).name for each in ("a", "short", "b", "other")] == ["a", "a", "b", "c"]
    for name in ("away", "gone"):
        assert refused(found, name).code == "model_not_found", "it has settings: it is no unknown name, only not there yet"


def test_an_entry_may_lead_to_an_alias() -> None:
    assert names({"fast": ["short"]}, a=ModelConfig(aliases=["short"])).resolve("fast").name == "a"


def test_a_fallback_is_the_first_that_can_serve() -> None:
    off = NotNow("model_incomplete", "a is incomplete", retry_after_s=10.0)
    bad = BadRequest("model_unusable", "b cannot be served", param="model")
    fast = {"fast": ["a", "nowhere", "b", "c"]}
    assert names(fast).resolve("fast").name == "a"
    assert names(fast, refusals={"a": off, "b": bad}).resolve("fast").name == "c"
    assert names(fast, full=("a", "b")).resolve("fast").name == "c"
    assert names(fast, full=("a",)).resolve("a").name == "a", "a model asked for by its own name waits as ever"


def test_none_can_serve() -> None:
    """The error is one that a client may retry where that is so, and says everything; what does not exist is left out."""
    bad = BadRequest("model_unusable", "a cannot be served", param="model")
    found = names({"fast": ["a", "nowhere", "b"]}, refusals={"a": bad}, full=("b",))
    error = refused(found, "fast")
    assert (error.code, error.status, error.retry_after_s) == ("queue_full", 429, 3.0)
    assert error.message == "None of the models that 'fast' leads to can serve this request: a cannot be served; b is full"
    assert refused(names({"one": ["a"]}, refusals={"a": bad}), "one") is bad
    assert refused(names({"one": ["nowhere"]}), "one").body() == no_model("one").body()


def test_rights_are_those_of_the_model_that_a_name_leads_to() -> None:
    found = names({"fast": ["a", "b"], "*": ["c"]}, a=ModelConfig(aliases=["short"]))
    assert found.resolve("fast", Tenant(("b",))).name == "b"
    assert refused(found, "fast", Tenant(("c",))).body() == no_model("fast").body()


def test_a_model_that_one_may_not_use_is_answered_as_an_unknown_name() -> None:
    """Else the default of unknown names would tell which names are models."""
    found = names({"*": ["c"]}, a=ModelConfig(aliases=["short"]), away=ModelConfig())
    for name in ("a", "short", "away", "no/such"):
        assert found.resolve(name, Tenant(("c",))).name == "c"
        assert refused(found, name, Tenant(())).body() == no_model(name).body()


def test_exact_names_are_listed_with_the_first_model_one_may_use() -> None:
    found = names({"fast": ["a", "b"], "gpt*": ["a"], "b": ["c"], "lost": ["nowhere"]})
    assert found.further({"a", "b", "c"}) == {"a": ["fast"]}
    assert found.further({"b"}) == {"b": ["fast"]}
    assert found.further(()) == {}


def test_what_is_known_by_name() -> None:
    found = names({"fast": ["a"], "gpt*": ["a"]}, a=ModelConfig(aliases=["short"]))
    assert [found.knows(each) for each in ("a", "short", "fast", "gpt*", "gpt-4", "x")] == [True, True, True, True, False, False]
    assert not found.knows("a", Tenant(()))


def test_commands_take_no_entries() -> None:
    found = names({"fast": ["a", "b"], "*": ["c"]}, a=ModelConfig(aliases=["short"]))
    assert found.local("short") == "a"
    for name, words in (("fast", "leads requests for it to a, b."), ("typo", "leads requests for it by the pattern '*' to c.")):
        with pytest.raises(HearthError) as caught:
            found.local(name)
        assert caught.value.status == 404
        assert caught.value.message == f"There is no model {name!r}. The table [names] {words}"


def test_the_operator_sees_where_names_lead() -> None:
    found = names({"fast": ["a", "b"], "gpt*": ["b"], "gpt-4*": ["nowhere"], "c": ["a"]}, full=("a",))
    rows = {row["name"]: row for row in found.rows()}
    assert [rows[each]["leads_to"] for each in rows] == ["b", "b", "", ""]
    assert [rows[each]["hidden"] for each in rows] == [False, False, False, True]
    assert rows["fast"]["targets"] == [{"name": "a", "problem": "a is full"}, {"name": "b", "problem": ""}]
    assert found.unknown_targets() == {"gpt-4*": ["nowhere"]}
    lead = found.lead("gpt-3")
    assert lead is not None
    assert lead.lines("gpt-3") == ["gpt-3 meets 'gpt*' of the table [names], which leads to b", "requests go to b"]
    assert found.lead("a") is None
