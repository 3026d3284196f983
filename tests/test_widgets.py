"""A picture with sliders: redrawn in a live kernel, and a still frame where nobody moves them."""

from types import SimpleNamespace

from cramnb.book import show


def test_a_slider_redraws_when_it_is_let_go(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=shown.append)
    live = SimpleNamespace(kernel=object())
    monkeypatch.setattr(show, "get_ipython", lambda: live)
    monkeypatch.setattr(show, "display", lambda *given, **_: shown.extend(given) or handle)
    show.interact(lambda first: f"at {first}", dict(first=2), first=(0, 7))
    slider, frame = shown
    assert frame == "at 2" and slider.value == 2 and slider.continuous_update is False
    slider.value = 5
    assert shown[-1] == "at 5"


def test_without_a_kernel_the_static_frame_stands_alone(capsys):
    show.interact(lambda first: f"at {first}", dict(first=2), first=(0, 7))
    assert capsys.readouterr().out.strip().strip("'") == "at 2"  # quoted once a shell was made
