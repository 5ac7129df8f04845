"""Gauges of savers, as Prometheus reads them."""

from __future__ import annotations

import pytest
import torch

from memsaver import MemorySaver
from memsaver.prometheus import SaverCollector

pytest.importorskip("prometheus_client")

Gauges = dict[tuple[str, ...], float]


def scraped(collector: SaverCollector) -> Gauges:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    families = [*text_string_to_metric_families(generate_latest(registry).decode())]
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    gauges: Gauges = {}
    for sample in samples:
        labels = [sample.labels[key] for key in ("saver", "tag") if key in sample.labels]
        gauges[(sample.name.removeprefix("memsaver_"), *labels)] = sample.value
    return gauges


def test_scrape_reads_all_savers_as_they_are(device: str) -> None:
    size = 4 << 20
    engine, trainer = MemorySaver(device=device), MemorySaver(device=device)
    weights = engine.empty((size,), torch.uint8, tag="weights", content="host")
    engine.empty((size,), torch.uint8, tag="kv_cache")
    trainer.empty((size,), torch.uint8, tag="weights")
    collector = SaverCollector(engine=engine, trainer=trainer)
    gauges = scraped(collector)
    for saver in ("engine", "trainer"):
        assert gauges["tag_committed_bytes", saver, "weights"] == size
        assert gauges["tag_active", saver, "weights"] == 1
    assert gauges["committed_bytes", "engine"] == 2 * size
    engine.pause("weights", release="retain")
    gauges = scraped(collector)
    report = engine.report(others=False)
    for figure in ("committed_bytes", "live_bytes", "backup_bytes", "disk_bytes", "aliased_bytes"):
        for tag, entry in report.tags.items():
            assert gauges[f"tag_{figure}", "engine", tag] == getattr(entry, figure)
    assert gauges["tag_active", "engine", "weights"] == 0
    assert gauges["tag_backup_bytes", "engine", "weights"] >= weights.nbytes
    assert gauges["pool_bytes", "engine"] == report.pool_bytes == size
    used = gauges.get(("device_used_bytes",))
    assert used is None if device == "cpu" else used and used >= 3 * size
    engine.close()
    assert scraped(collector)["committed_bytes", "engine"] == 0
    trainer.close()


def test_scrape_leaves_the_figures_that_others_drain(device: str) -> None:
    saver = MemorySaver(device=device)
    saver.empty((1 << 20,), tag="weights")
    scraped(SaverCollector(engine=saver))
    assert [event.tag for event in saver.drain_events()] == ["weights"]
    saver.close()
