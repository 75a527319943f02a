"""Imports of optional and of large packages."""

from __future__ import annotations

import gc

import pytest

from hnclip.util.optional import import_extra, large_import


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(ValueError, match=r"no_such_package.*hnclip\[data\]"):
        import_extra("no_such_package.part", "Parquet files", "data")


def test_the_collector_is_paused_during_large_imports_and_left_alone_if_it_is_off():
    assert gc.isenabled()
    for error in (None, ImportError):
        try:
            with large_import():
                assert not gc.isenabled()
                if error:
                    raise error
        except ImportError:
            pass
        assert gc.isenabled()
    gc.disable()
    try:
        with large_import():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
