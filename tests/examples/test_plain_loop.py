from __future__ import annotations

import plain_loop

from hnclip.data.scenes import scene_records


def test_the_script_runs(monkeypatch, capsys):
    monkeypatch.setattr(plain_loop, "scene_records", lambda *args, **_: scene_records(*args, families=4, members=4))
    plain_loop.main(steps=2, batch=8)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["R@1 before", "step  0", "step  1", "R@1 after"]
