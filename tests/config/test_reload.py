from config.reload import plan
from config.schema import ModelConfig, NodeConfig


def test_live_keys_apply_and_the_rest_is_named() -> None:
    running = NodeConfig(max_wait_s=60.0, listen="a:1", models={"m": ModelConfig(max_model_len=100)})
    new = NodeConfig(
        max_wait_s=5.0,
        listen="a:2",
        models={"m": ModelConfig(max_model_len=200, priority=3.0), "n": ModelConfig(aliases=["x"])},
    )
    result = plan(running, new)
    assert result.applied == ["max_wait_s", 'models."m".priority', 'models."n".aliases']
    assert result.needs_restart == ["listen", 'models."m".max_model_len']
    assert (result.effective.max_wait_s, result.effective.listen) == (5.0, "a:1")
    assert result.effective.models["m"] == ModelConfig(max_model_len=100, priority=3.0)
    assert result.effective.models["n"].aliases == ["x"]


def test_a_removed_table_goes_back_to_defaults() -> None:
    result = plan(NodeConfig(models={"m": ModelConfig(aliases=["x"], dtype="float32")}), NodeConfig())
    assert result.effective.models["m"] == ModelConfig(dtype="float32")
    assert result.needs_restart == ['models."m".dtype']


def test_nothing_changed() -> None:
    assert plan(NodeConfig(), NodeConfig()).applied == []
