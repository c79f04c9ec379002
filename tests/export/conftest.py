"""Run folders to ship from."""

from tests.small_runs import net_run, pictures, vit_run

__all__ = ["net_run", "pictures", "vit_run"]
