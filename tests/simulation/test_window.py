from rlkit.simulation.window import Window


def test_the_name_says_how_a_metric_is_reduced() -> None:
    window = Window()
    for value in (1.0, 2.0, 6.0):
        for name in ("a/mean_s", "a/things_total", "a/length_max", "completions/min_length"):
            window.add(name, value)
    window.add_ratio("a/tok_s", 10, 1)
    window.add_ratio("a/tok_s", 10, 4)
    window.add_ratio("a/nothing", 1, 0)
    assert window.reduce() == {
        "a/mean_s": 3.0,
        "a/things_total": 9.0,
        "a/length_max": 6.0,
        "completions/min_length": 1.0,
        "a/tok_s": 4.0,
    }
    assert window.reduce() == {}
