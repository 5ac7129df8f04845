"""Gauges of savers for Prometheus, by the package prometheus_client.

>>> from prometheus_client import REGISTRY, start_http_server
>>> REGISTRY.register(SaverCollector(engine=saver))
>>> start_http_server(9464)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from memsaver.report import TagReport

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

    from memsaver.saver import MemorySaver

TAG_FIGURES = {
    "committed_bytes": "Physical memory behind a tag",
    "live_bytes": "Allocations in use on a tag",
    "aliased_bytes": "Memory of another saver behind a tag",
    "backup_bytes": "Host memory for the content of a paused tag",
    "disk_bytes": "File that holds the content of a paused tag",
}
SAVER_FIGURES = {
    "committed_bytes": "Physical memory of all tags and of the page pool",
    "pool_bytes": "Physical memory that the page pool retains",
    "backup_bytes": "Host memory for the content of paused tags",
}


class SaverCollector:
    """Collector of prometheus_client that reports savers when they are scraped.

    Between scrapes it costs nothing. A scrape calls `MemorySaver.report`, so it waits for a running
    operation of the saver. A process needs a single collector for all of its savers.

    Args:
        **savers: The savers, by the value of their label `saver`.
    """

    def __init__(self, **savers: MemorySaver) -> None:
        self._savers = savers

    def describe(self) -> list[GaugeMetricFamily]:
        """Return no metrics, so that registering does not call `collect`.

        Returns:
            An empty list.
        """
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read all savers.

        Yields:
            Gauges of tags (labels saver, device and tag), and of savers and devices.
        """
        from prometheus_client.core import GaugeMetricFamily

        reports = {name: saver.report(others=False) for name, saver in self._savers.items()}

        def of_tags(name: str, text: str, value: Callable[[TagReport], float]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text, labels=["saver", "device", "tag"])
            for saver, report in reports.items():
                for tag, entry in report.tags.items():
                    family.add_metric([saver, report.device, tag], value(entry))
            return family

        for figure, text in TAG_FIGURES.items():
            yield of_tags(f"memsaver_tag_{figure}", text, attrgetter(figure))
        text = "1 for an active tag, 0 for a paused one"
        yield of_tags("memsaver_tag_active", text, lambda entry: entry.state == "active")
        for figure, text in SAVER_FIGURES.items():
            family = GaugeMetricFamily(f"memsaver_{figure}", text, labels=["saver", "device"])
            for saver, report in reports.items():
                family.add_metric([saver, report.device], getattr(report, figure))
            yield family
        text = "Used memory of a GPU, by all processes"
        used = GaugeMetricFamily("memsaver_device_used_bytes", text, labels=["device"])
        for device in sorted({report.device for report in reports.values()} - {"cpu"}):
            free, total = torch.cuda.mem_get_info(device)
            used.add_metric([device], total - free)
        yield used
