"""Which runs compute the same: what of their configs counts. No torch here."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

# Where and how a run is executed and shown, not what it computes: may differ when it goes on.
NOT_COMPARED = (
    *("run_dir", "runs_dir", "resume", "allow_changes", "publish_dir", "launcher", "logger"),
    *("requires", "compile", "activation_checkpointing", "callbacks.progress", "callbacks.last"),
    *("data.prepared_dir", "data.num_workers", "data.pin_memory", "data.prefetch_factor"),
    "data.strict",
    *("trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.profiler"),
    *("trainer.log_every_n_steps", "trainer.max_time", "callbacks.finite_loss.every_n_steps"),
)


def differences(before: DictConfig, now: DictConfig) -> list[str]:
    """`key: before → now` for each value that changes what a run computes."""
    old, new = compared(before), compared(now)
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)} → {new.get(key)}" for key in keys]


def compared(config: DictConfig) -> dict[str, Any]:
    """The values that change what a run computes, by their dotted keys."""
    plain: dict[str, Any] = {}

    def visit(node: Any, name: str) -> None:
        if name in NOT_COMPARED:
            return
        if isinstance(node, dict):
            for key, value in node.items():
                visit(value, f"{name}.{key}" if name else str(key))
        else:
            plain[name] = node

    visit(OmegaConf.to_container(config, resolve=True), "")
    if plain.get("data.fold") is None:
        plain.pop("data.folds", None)  # nothing is cut into them
    return plain
