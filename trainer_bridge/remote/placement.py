"""Placement of trainer ranks and engine ranks on the devices of one or more machines."""

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of a trainer and its engines, and the ranks on each device.

    Devices with a trainer rank come first, machine by machine, so a trainer rank has the number of
    its device. Devices with an engine rank only follow, machine by machine.

    Attributes:
        nodes: Machines with trainer ranks.
        devices: Devices of each machine with a trainer rank.
        rollout_devices: Further devices of each machine, with an engine rank only.
        rollout_nodes: Further machines of the same size, whose devices have an engine rank only.
        colocate: Whether devices with a trainer rank have an engine rank, too.
        engine_size: Ranks of one engine (tensor parallelism), all on one machine.

    Raises:
        ValueError: No device has an engine rank, or `engine_size` does not divide the devices of
            one kind.
    """

    nodes: int = 1
    devices: int = 1
    rollout_devices: int = 0
    rollout_nodes: int = 0
    colocate: bool = True
    engine_size: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.devices) < 1:
            raise ValueError(f"nodes={self.nodes} and devices={self.devices} must be at least 1")
        if min(self.rollout_devices, self.rollout_nodes) < 0:
            text = f"rollout_devices={self.rollout_devices} and rollout_nodes={self.rollout_nodes}"
            raise ValueError(f"{text} must be at least 0")
        if not (self.colocate or self.rollout_devices or self.rollout_nodes):
            text = "rollout_devices=0 with colocate=False leaves no device to the engines"
            raise ValueError(f"{text}; set rollout_devices=1 or rollout_nodes=1")
        kinds = {"rollout_devices": self.rollout_devices}
        if self.colocate:
            kinds["devices"] = self.devices
        if self.rollout_nodes:
            kinds["devices + rollout_devices"] = self.per_node
        for name, count in kinds.items():
            if count % self.engine_size:
                text = f"tensor_parallel_size={self.engine_size} does not divide {name}={count}"
                raise ValueError(f"{text}; an engine stays on one machine")

    @property
    def per_node(self) -> int:
        """Return the number of devices of a machine."""
        return self.devices + self.rollout_devices

    @property
    def machines(self) -> int:
        """Return the number of machines."""
        return self.nodes + self.rollout_nodes

    @property
    def trainers(self) -> range:
        """Return the devices of the trainer ranks."""
        return range(self.nodes * self.devices)

    @property
    def engines(self) -> range:
        """Return the devices of the engine ranks, in the order of the ranks."""
        return range(0 if self.colocate else len(self.trainers), self.size)

    @property
    def shared(self) -> range:
        """Return the devices with a trainer rank and an engine rank."""
        return self.trainers if self.colocate else range(0)

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.machines * self.per_node

    @property
    def ranks(self) -> int:
        """Return the number of ranks of both sides."""
        return len(self.trainers) + len(self.engines)

    @property
    def alone(self) -> bool:
        """Return whether there is a single device, whose actors need no number."""
        return self.size == 1

    def owners(self) -> list[int | None]:
        """Return the trainer rank that calls each engine rank in a sync.

        It is the rank of the same device, or else a rank of the same machine. On a machine without
        a trainer rank it is None: the engine rank receives its bytes itself (`RolloutRankActor`).
        """
        apart = product(range(self.nodes), range(self.rollout_devices))
        ranks = [node * self.devices + index % self.devices for node, index in apart]
        return [*self.shared, *ranks, *[None] * (self.rollout_nodes * self.per_node)]

    def bundles(self) -> list[tuple[int, int, int]]:
        """Return machine, index on the machine, and number of ranks of each device."""
        both = product(range(self.nodes), range(self.devices))
        only = product(range(self.nodes), range(self.rollout_devices))
        far = product(range(self.nodes, self.machines), range(self.per_node))
        ranks = 2 if self.colocate else 1
        return [
            *((node, index, ranks) for node, index in both),
            *((node, self.devices + index, 1) for node, index in only),
            *((node, index, 1) for node, index in far),
        ]
