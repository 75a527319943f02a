"""Imports of optional and of large packages."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from hnclip.util.optional import import_extra, large_import


def test_a_missing_package_is_an_error_with_its_extra():
    with pytest.raises(ValueError, match=r"no_such_package.*hnclip\[data\]"):
        import_extra("no_such_package.part", "Parquet files", "data")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_during_large_imports_and_restored_after_errors(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(ImportError), large_import():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
