"""Serve a model over HTTP: the engine in processes of its own, the server in this one."""

import asyncio
import contextlib
import difflib
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError

from recipes.config.yaml_values import with_overrides
from recipes.errors import RecipeError, RunError, one_line, shown
from recipes.setup.model_files import find_model, quiet_transformers
from rollout import AdapterSlots, AsyncEngine, EngineConfig
from rollout.actor import RolloutActor
from rollout.loop import RankProcesses
from rollout.model import AdapterFolder

_CHECK_SECONDS = 0.1
_GRACE_SECONDS = 2  # for open connections after a signal


@dataclass(frozen=True, kw_only=True)
class Service:
    """How `memsaver serve` serves a model.

    Attributes:
        model: Model directory, the name of a fetched model, or ORG/NAME of the Hub.
        overrides: `key=value` settings of the engine, fields of `EngineConfig`.
        name: Name of the model for clients; None: as `model` names it.
        host: Address to listen at.
        port: Port to listen at; 0: any that is free.
        device: "cpu", or "cuda" for the first GPUs; None: these if there are any.
        adapters: Folders of adapters by name, each a model of its own.
        max_waiting: Requests that wait for their first tokens; more are refused.
        api_keys: File with a key in each line, of which a request must have one.
        admin_keys: The same for pauses.
        paused: Whether requests wait during a pause.
        tool_format: See `rollout.server.ChatFormat`.
    """

    model: str
    overrides: Sequence[str] = ()
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str | None = None
    adapters: Mapping[str, str]
    max_waiting: int = 1024
    api_keys: Path | None = None
    admin_keys: Path | None = None
    paused: Literal["wait", "refuse"] = "wait"
    tool_format: str | None = None


def serve_model(service: Service) -> None:
    """Serve a model until a signal, or the end of its engine.

    Raises:
        RecipeError: An option, a setting of the engine, a key file or a folder is wrong, or the
            port is in use. Nothing was started.
        RunError: The engine could not be started, or has ended.
        KeyboardInterrupt: A signal ended the server.
    """
    folder = find_model(service.model)
    config = _engine_config(service)
    front = _front(service, folder)
    with _listening(service) as listener, _engine(service, folder, config) as ranks:
        asyncio.run(_serve(service, ranks, listener, *front))


def _front(service: Service, folder: Path) -> tuple[Any, Callable[..., Any]]:
    """Return the chat format, and what makes the options from the longest context."""
    try:
        from rollout.server import ChatFormat, ServerOptions

        with quiet_transformers():
            chat = ChatFormat.of(folder, service.tool_format)
    except ImportError as error:
        missing = f"{error.name} is missing; pip install 'memsaver[serve]'"
        raise RecipeError(f"serve: {missing}") from error
    except ValueError as error:
        raise RecipeError(f"serve {service.model}: {one_line(error)}") from error
    keys = _keys("--api-key-file", service.api_keys)
    admin = _keys("--admin-key-file", service.admin_keys)
    if not keys and not _is_loopback(service.host):
        rule = "is not this machine alone, and anyone who reaches it could ask"
        raise RecipeError(f"--host {service.host}: {rule}; give --api-key-file")
    return chat, partial(
        ServerOptions,
        model=service.name or service.model,
        adapters=tuple(service.adapters),
        keys=keys,
        admin_keys=admin,
        paused=service.paused,
    )


def _keys(option: str, file: Path | None) -> tuple[str, ...]:
    """Read the keys of a file."""
    if file is None:
        return ()
    try:
        keys = tuple(filter(None, map(str.strip, file.read_text(encoding="utf-8").splitlines())))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{option} {file}: cannot be read: {one_line(error)}") from error
    if not keys:
        raise RecipeError(f"{option} {file}: has no key; write one in each line")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _engine_config(service: Service) -> dict[str, Any]:
    """Return the checked settings of the engine."""
    known = [field.name for field in fields(EngineConfig)]
    values = with_overrides({}, service.overrides)
    for key in values.keys() - set(known):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        raise RecipeError(f"{key}={shown(values[key])}: the engine has no such setting; {hint}")
    try:
        folders = [AdapterFolder.open(path) for path in service.adapters.values()]
        config: EngineConfig = TypeAdapter(EngineConfig).validate_python(values)
    except ValidationError as error:
        fault = error.errors()[0]
        rule = fault["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, fault["loc"]))
        raise RecipeError(f"{key}: {rule}" if key else rule) from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"--adapter: {one_line(error)}") from error
    if folders and config.adapters is None:
        slots = AdapterSlots(slots=len(folders), rank=max(folder.rank for folder in folders))
        config = replace(config, adapters=slots)
    return {field: getattr(config, field) for field in known}


@contextlib.contextmanager
def _listening(service: Service) -> Iterator[socket.socket]:
    """Open the socket before the engine starts, which takes longer."""
    try:
        family = socket.getaddrinfo(service.host, service.port)[0][0]
        listener = socket.create_server((service.host, service.port), family=family, backlog=2048)
    except OSError as error:
        why = error.strerror or one_line(error)
        raise RecipeError(
            f"serve: cannot listen at {service.host}:{service.port}: {why}"
        ) from error
    with listener:
        yield listener


@contextlib.contextmanager
def _engine(service: Service, folder: Path, config: Mapping[str, Any]) -> Iterator[RankProcesses]:
    """Start the processes of the engine, which end with the block."""
    device = service.device or ("cuda" if torch.cuda.is_available() else "cpu")
    make = partial(_rank, str(folder), device, dict(config))
    print(f"loading {service.model} ...", flush=True)
    with contextlib.ExitStack() as undo:
        try:
            ranks = RankProcesses(make, config["tensor_parallel_size"])
            undo.callback(ranks.close)
            for name, path in service.adapters.items():
                ranks.call("load_adapter", path, name)
        except Exception as error:
            raise RunError("start of the engine", one_line(error)) from error
        yield ranks


def _rank(path: str, device: str, config: Mapping[str, Any], rank: int) -> RolloutActor:
    """Make the actor of a rank, in its process."""
    gpu = device == "cuda"
    place, dtype = (f"cuda:{rank}", "bfloat16") if gpu else (device, "float32")
    return RolloutActor(path, device=place, dtype=dtype, engine=config)


async def _serve(
    service: Service,
    ranks: RankProcesses,
    listener: socket.socket,
    chat: Any,
    options_of: Callable[..., Any],
) -> None:
    import uvicorn

    from rollout.server import KEEP_ALIVE, make_app

    longest = ranks.call("max_context_len")[0]
    options = options_of(max_context_len=longest)
    async with AsyncEngine(ranks, service.max_waiting) as shared:
        app = make_app(shared, chat, options)
        how: Any = {"log_level": "warning", "timeout_graceful_shutdown": _GRACE_SECONDS}
        how["timeout_keep_alive"] = KEEP_ALIVE
        server = uvicorn.Server(uvicorn.Config(app, **how))
        watching = asyncio.create_task(_watch(shared, server))
        host, port = listener.getsockname()[:2]
        print(f"serving {options.model} at http://{host}:{port}/v1 ({longest} tokens)", flush=True)
        await server.serve(sockets=[listener])
        await watching
        if shared.ended:
            raise RunError("serve", "the engine has ended", "what it printed says why")


async def _watch(shared: AsyncEngine, server: Any) -> None:
    """End the server after its engine, and the requests when a signal ends the server."""
    while not (shared.ended or server.should_exit):
        await asyncio.sleep(_CHECK_SECONDS)
    server.should_exit = True
    if not shared.ended:
        await shared.pause_generation("abort")
