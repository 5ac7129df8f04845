"""Tells how much host memory a trainer's parked tags take, before it is built."""

from collections.abc import Iterable

from torch import nn

from memsaver import MemorySaver
from memsaver.common.rounding import round_up
from trainer_bridge.config import TrainerConfig
from trainer_bridge.tags import CRITIC, CRITIC_OPTIM, OPTIM, PARAMS, REFERENCE
from trainer_bridge.training.memory import ALIGN
from trainer_bridge.training.model import meta_model


def reserve_parked(config: TrainerConfig, ranks: int, saver: MemorySaver) -> None:
    """Begin to obtain the host memory that one of `ranks` ranks parks `config.leaving` in, beside
    what comes next. Nothing more where that was begun before.
    """
    if nbytes := parked_bytes(config, ranks):
        saver.reserve_host(nbytes)


def parked_bytes(config: TrainerConfig, ranks: int) -> int:
    """Returns the host bytes that copies of `config.leaving` take on one of `ranks` ranks: all of
    them, from the model's config.json alone. The critic is taken for as large as the policy.
    """
    if not config.leaving:
        return 0
    params = list(meta_model(config).parameters())
    trained = [param for param in params if param.requires_grad]
    own, computing = config.torch_dtype.itemsize, config.torch_param_dtype.itemsize
    sizes = {
        PARAMS: _held(params, ranks),
        OPTIM: 0 if config.optimizer_offload else 2 * _held(trained, ranks),
        CRITIC: _held(params, ranks, own),
        CRITIC_OPTIM: 2 * _held(params, ranks, own),
        REFERENCE: _held(params, ranks, computing),
    }
    return sum(sizes[tag] for tag in config.leaving)


def _held(params: Iterable[nn.Parameter], ranks: int, itemsize: int | None = None) -> int:
    """Bytes of a rank's rows, side by side. itemsize: of an element; None: as the model has it."""
    total = 0
    for param in params:
        rows = -(-param.shape[0] // ranks)
        elements = rows * param[0].numel()
        total += round_up(elements * (itemsize or param.element_size()), ALIGN)
    return total
