from sglang.srt.plugins.hook_registry import HookRegistry


def load_plugins() -> None:
    HookRegistry.apply_hooks()
