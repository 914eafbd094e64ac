import math

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Annotation, Text

from llm_systems_cookbook import plots
from llm_systems_cookbook.plots import Span, serving, style

LONG = "A takeaway so long that it needs two lines, at the very least: 96 %"
LOADS = [1, 2, 4, 6, 8]
NAN = math.nan

ALL_KINDS = [
    Span("A", "waiting", 0, 2),
    Span("A", "prefill", 2, 4),
    Span("A", "decode", 4, 9),
    Span("A", "preempted", 9, 12),
    Span("A", "prefill", 12, 14),
    Span("A", "decode", 14, 22),
    Span("B", "prefill", 0, 1),
    Span("B", "decode", 1, 8),
    Span("B", "swapped", 8, 15),
    Span("B", "decode", 15, 20),
    Span("B", "idle seat", 20, 22),
]


def draw_timeline(title=LONG):
    more = [
        Span(f"a request with a long name, {i}", "decode", i, i + 9)
        for i in range(22)
    ]
    return plots.timeline(ALL_KINDS + more, title=title)


def draw_pool(title=LONG):
    times = list(range(2500))
    return plots.pool_over_time(
        times,
        {
            "token_states": [500 + (t % 100) for t in times],
            "reserved": [40] * 2500,
            "internal": [70] * 2500,
            "external": [9] * 2500,
        },
        capacity=102_400,
        title=title,
        preemptions=list(range(0, 2400, 3)),
    )


def draw_occupancy(title=LONG):
    series = {
        f"an engine with a name, {i}": (range(0, 40, 1 + i), [i] * n)
        for i, n in enumerate((40, 20, 14))
    }
    return plots.occupancy_lines(
        series, capacity=4, title=title, preemptions=[3]
    )


def draw_latency(title=LONG):
    curves = {f"engine {i}": [v + i for v in LOADS] for i in range(8)}
    return plots.latency_against_load(
        LOADS,
        curves,
        upper={n: [2 * v for v in y] for n, y in curves.items()},
        slo=7,
        title=title,
        ylabel="time to first token (ms)",
        kinds={"engine 0": "waste", "engine 1": "live"},
    )


DRAWINGS = [draw_timeline, draw_pool, draw_occupancy, draw_latency]


@pytest.fixture(autouse=True)
def _agg():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def bars(fig, kind=None):
    """Return the bars of a timeline, of one kind or of all."""
    found = [p for p in fig.axes[0].patches if isinstance(p, Rectangle)]
    if kind is None:
        return found
    colour = serving._PAINTS[kind].colour.lower()
    return [b for b in found if to_hex(b.get_facecolor()) == colour]


def extent(bar):
    return bar.get_x(), bar.get_x() + bar.get_width()


def row_of(bar):
    return round(bar.get_y() + bar.get_height() / 2)


def marks(fig, name):
    """Return the (time, row) points of a mark of a timeline."""
    marker = serving._MARKS[name]["marker"]
    for line in fig.axes[0].get_lines():
        if line.get_marker() == marker:
            return list(zip(*line.get_data(), strict=True))
    return []


def layers(fig):
    found = [p for p in fig.axes[0].patches if isinstance(p, StepPatch)]
    return [p.get_data() for p in found]


def key_words(fig):
    legend = fig.axes[0].get_legend()
    return [] if legend is None else [t.get_text() for t in legend.texts]


def end_labels(fig):
    return [t for t in fig.findobj(Annotation) if t.get_text()]


def pixels(fig):
    fig.canvas.draw()
    return np.asarray(fig.canvas.buffer_rgba()).copy()


# --- all figures -----------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWINGS)
def test_title_is_the_takeaway_on_opaque_white(draw):
    fig = draw()
    assert fig.get_suptitle().replace("\n", " ") == LONG
    assert fig.get_facecolor() == (1, 1, 1, 1)
    assert fig.get_figwidth() == 7


@pytest.mark.parametrize("draw", DRAWINGS)
def test_nothing_is_cut_off_and_text_is_large_enough(draw):
    fig = draw()
    plots.note(fig, "Measured on 2 cores.")
    fig.canvas.draw()
    box = fig.get_tightbbox()
    assert box.x0 >= -0.01
    assert box.y0 >= -0.01
    assert box.x1 <= fig.get_figwidth() + 0.01
    assert box.y1 <= fig.get_figheight() + 0.01
    assert min(t.get_size() for t in fig.findobj(Text) if t.get_text()) >= 9


@pytest.mark.parametrize("draw", DRAWINGS)
def test_the_key_covers_neither_title_nor_axes(draw):
    fig = draw()
    fig.canvas.draw()
    key = fig.axes[0].get_legend().get_window_extent()
    assert key.y0 >= fig.axes[0].get_window_extent().y1
    assert key.y1 <= fig._suptitle.get_window_extent().y0
    assert key.x0 >= 0
    assert key.x1 <= fig.bbox.width


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_dark_style_of_the_reader_changes_no_pixel(draw):
    plain = pixels(draw())
    with plt.style.context("dark_background"):
        dark = pixels(draw())
    np.testing.assert_array_equal(plain, dark)


@pytest.mark.parametrize("draw", DRAWINGS)
def test_the_same_data_give_the_same_pixels(draw):
    np.testing.assert_array_equal(pixels(draw()), pixels(draw()))


@pytest.mark.parametrize("draw", DRAWINGS)
def test_rcparams_and_backend_are_left_alone(draw):
    plt.switch_backend("svg")
    with plt.style.context("dark_background"):
        before = dict(mpl.rcParams)
        draw()
        assert dict(mpl.rcParams) == before
    assert mpl.get_backend().lower() == "svg"


def test_every_orange_area_is_hatched():
    orange = {plots.WASTE, plots.WASTE_LIGHT, plots.WASTE_DARK}
    orange = {colour.lower() for colour in orange}
    for draw in (draw_timeline, draw_pool):
        areas = draw().axes[0].patches
        found = [a for a in areas if to_hex(a.get_facecolor()) in orange]
        assert found
        assert all(area.get_hatch() for area in found)
    bands = draw_latency().axes[0].collections
    assert [bool(band.get_hatch()) for band in bands] == [True] + [False] * 7


# --- merge_spans -----------------------------------------------------------


def test_merge_spans_joins_steps_of_a_kind_in_any_order():
    steps = [
        Span("B", "prefill", 1, 2),
        Span("A", "decode", 2, 3),
        Span("A", "decode", 1, 2),
        Span("B", "decode", 2, 3),
        Span("A", "decode", 3, 4),
    ]
    assert plots.merge_spans(steps) == [
        Span("B", "prefill", 1, 2),
        Span("B", "decode", 2, 3),
        Span("A", "decode", 1, 4),
    ]


def test_merge_spans_keeps_a_gap_and_another_kind_between():
    steps = [
        Span("A", "decode", 0, 1),
        Span("A", "decode", 2, 3),
        Span("A", "preempted", 3, 4),
        Span("A", "decode", 4, 5),
    ]
    assert plots.merge_spans(steps) == steps
    assert plots.merge_spans([]) == []


def test_merge_spans_does_not_join_two_requests():
    steps = [Span("A", "decode", 0, 1), Span("B", "decode", 1, 2)]
    assert plots.merge_spans(steps) == steps


def test_merge_spans_refuses_an_overlap():
    steps = [Span("A", "decode", 0, 2), Span("A", "decode", 1, 3)]
    with pytest.raises(ValueError, match="overlap"):
        plots.merge_spans(steps)


# --- timeline --------------------------------------------------------------


def test_timeline_bars_have_the_extent_and_row_of_their_spans():
    fig = plots.timeline(ALL_KINDS, title="t")
    drawn = [(row_of(b), *extent(b)) for b in bars(fig)]
    expected = [("AB".index(s.request), s.start, s.end) for s in ALL_KINDS]
    assert drawn == expected
    rows = [t.get_text() for t in fig.axes[0].get_yticklabels()]
    assert rows == ["A", "B"]


def test_timeline_colours_each_span_by_its_kind():
    fig = plots.timeline(ALL_KINDS, title="t")
    for kind in serving._PAINTS:
        spans = [(s.start, s.end) for s in ALL_KINDS if s.kind == kind]
        assert [extent(b) for b in bars(fig, kind)] == spans, kind
    decode = bars(fig, "decode")[0]
    assert to_hex(decode.get_facecolor()) == plots.LIVE.lower()
    lost = bars(fig, "preempted")[0]
    assert to_hex(lost.get_facecolor()) == plots.WASTE.lower()


def test_timeline_kinds_differ_without_colour():
    paints = serving._PAINTS.values()
    assert len({(paint.hatch, paint.tall) for paint in paints}) == len(paints)


def test_timeline_bars_of_the_batch_are_the_tall_ones():
    tall = {kind: serving._PAINTS[kind].tall > 0.5 for kind in serving._PAINTS}
    assert [kind for kind, is_tall in tall.items() if is_tall] == [
        "prefill",
        "decode",
        "idle seat",
    ]


def test_timeline_marks_arrival_preemption_resume_and_finish():
    fig = plots.timeline(ALL_KINDS, title="t")
    assert marks(fig, "arrival") == [(0, 0), (0, 1)]
    assert marks(fig, "preemption") == [(9, 0), (8, 1)]
    assert marks(fig, "resume") == [(12, 0), (15, 1)]
    assert marks(fig, "finish") == [(22, 0), (20, 1)]  # not the idle seat's


def test_timeline_gives_no_finish_to_what_goes_on_or_waits():
    spans = [
        Span("A", "decode", 0, 4),
        Span("B", "decode", 0, 2),
        Span("B", "preempted", 2, 4),
        Span("C", "waiting", 1, 4),
    ]
    fig = plots.timeline(spans, title="t", unfinished=["A"])
    assert marks(fig, "finish") == []
    assert marks(fig, "preemption") == [(2, 1)]
    assert "finish" not in key_words(fig)


def test_timeline_shows_a_preemption_that_takes_no_time():
    spans = [
        Span("A", "decode", 0, 2),
        Span("A", "preempted", 2, 2),
        Span("A", "prefill", 2, 3),
    ]
    fig = plots.timeline(spans, title="t")
    assert marks(fig, "preemption") == marks(fig, "resume") == [(2, 0)]
    assert not bars(fig, "preempted")


def test_timeline_explains_only_what_is_drawn():
    fig = plots.timeline([Span("A", "decode", 0, 2)], title="t")
    assert key_words(fig) == ["decode", "arrival", "finish"]


def test_timeline_draws_spans_given_in_any_order():
    fig = plots.timeline(ALL_KINDS[::-1], title="t")
    rows = [t.get_text() for t in fig.axes[0].get_yticklabels()]
    assert rows == ["B", "A"]
    assert marks(fig, "preemption") == [(8, 0), (9, 1)]


def test_timeline_of_steps_has_whole_ticks():
    fig = plots.timeline([Span("A", "decode", 0, 3)], title="t")
    fig.canvas.draw()
    assert all(float(x).is_integer() for x in fig.axes[0].get_xticks())


def test_timeline_rows_are_as_high_with_four_as_with_twenty_four():
    pitches = []
    for count in (4, 24):
        spans = [Span(str(i), "decode", 0, 1) for i in range(count)]
        fig = plots.timeline(spans, title="t")
        fig.canvas.draw()
        pitches.append(fig.axes[0].get_window_extent().height / count)
    assert pitches[0] == pytest.approx(pitches[1], rel=0.15)
    assert min(pitches) > 9 * 100 / 72  # a line of text, in pixels


@pytest.mark.parametrize(
    ("spans", "unfinished", "message"),
    [
        ([Span("A", "running", 0, 1)], (), "unknown kind 'running'"),
        ([Span("A", "decode", 2, 1)], (), "ends before it starts"),
        ([Span("A", "decode", NAN, 1)], (), "must be finite"),
        ([Span("A", "decode", 0, math.inf)], (), "must be finite"),
        (
            [Span("A", "decode", 0, 2), Span("A", "prefill", 1, 3)],
            (),
            "overlap",
        ),
        ([Span("A", "decode", 0, 2)], ("B",), "'B'. have no span"),
    ],
)
def test_timeline_refuses_bad_input(spans, unfinished, message):
    with pytest.raises(ValueError, match=message):
        plots.timeline(spans, title="t", unfinished=unfinished)
    assert not plt.get_fignums()


# --- pool_over_time --------------------------------------------------------


def test_pool_over_time_stacks_steps_that_hold_until_the_next_time():
    fig = plots.pool_over_time(
        [0, 1, 5],
        {"reserved": [3, 4, 9], "token_states": [10, 20, 1]},
        capacity=50,
        title="t",
    )
    tokens, reserved = layers(fig)
    np.testing.assert_array_equal(tokens.edges, [0, 1, 5])
    np.testing.assert_array_equal(tokens.baseline, [0, 0])
    np.testing.assert_array_equal(tokens.values, [10, 20])
    np.testing.assert_array_equal(reserved.baseline, [10, 20])
    np.testing.assert_array_equal(reserved.values, [13, 24])
    colours = [to_hex(p.get_facecolor()) for p in fig.axes[0].patches]
    assert colours == [plots.LIVE.lower(), plots.WASTE_LIGHT.lower()]


def test_pool_over_time_draws_the_capacity_and_each_preemption():
    fig = plots.pool_over_time(
        [0, 100],
        {"token_states": [1, 1]},
        capacity=1024,
        title="t",
        preemptions=[70, 20],
    )
    (line,) = fig.axes[0].get_lines()
    assert set(line.get_ydata()) == {1024}
    (ticks,) = fig.axes[0].collections
    assert [s[0][0] for s in ticks.get_segments()] == [20, 70]
    assert min(s[0][1] for s in ticks.get_segments()) > 1024
    assert key_words(fig) == [
        "token states",
        "capacity 1,024",
        "2 preemptions",
    ]


def test_pool_over_time_has_a_taller_tick_where_preemptions_fall_together():
    fig = plots.pool_over_time(
        [0, 1000],
        {"token_states": [1, 1]},
        capacity=10,
        title="t",
        preemptions=[100, 500, 500, 500.5],
    )
    (ticks,) = fig.axes[0].collections
    one, three = [s[1][1] - s[0][1] for s in ticks.get_segments()]
    assert one < three
    assert "4 preemptions" in key_words(fig)


def test_pool_over_time_draws_two_thousand_times_as_they_are():
    times = np.arange(2000)
    held = {"token_states": times % 7}
    fig = plots.pool_over_time(times, held, capacity=9, title="t")
    (tokens,) = layers(fig)
    np.testing.assert_array_equal(tokens.values, (times % 7)[:-1])
    assert fig.get_supxlabel() == ""


def test_pool_over_time_bins_more_times_and_says_so():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.uniform(0.1, 3.0, 5000))
    held = rng.uniform(0, 100, 5000)
    fig = plots.pool_over_time(
        times, {"token_states": held}, capacity=100, title="t"
    )
    (tokens,) = layers(fig)
    assert len(tokens.values) == 1000
    area = (tokens.values * np.diff(tokens.edges)).sum()
    assert area == pytest.approx((held[:-1] * np.diff(times)).sum())
    assert "5,000 points" in fig.get_supxlabel()
    assert "time-weighted means of 1,000" in fig.get_supxlabel()


def test_pool_over_time_a_bin_is_the_time_weighted_mean():
    # 3,001 times, 2 s and 1 s apart in turn: bins of 4.5 s.
    times = np.concatenate(([0], np.cumsum(np.tile([2, 1], 1500))))
    held = np.where(np.arange(3001) % 2 == 0, 6.0, 0.0)
    fig = plots.pool_over_time(
        times, {"token_states": held}, capacity=6, title="t"
    )
    (tokens,) = layers(fig)
    # 6 for 2 s, 0 for 1 s, 6 for 1.5 s; then 0.5 s, 0, 2 s, 0.
    np.testing.assert_allclose(tokens.values[:2], [21 / 4.5, 15 / 4.5])


@pytest.mark.parametrize(
    ("times", "split", "options", "message"),
    [
        ([], {"token_states": []}, {}, "times must be"),
        ([0], {"token_states": [1]}, {}, "2 or more, got 1"),
        ([0, 0], {"token_states": [1, 1]}, {}, "must rise, got 0 after 0"),
        ([0, NAN], {"token_states": [1, 1]}, {}, "finite"),
        ([0, 1], {"lost": [1, 1]}, {}, r"unknown parts \['lost'\]"),
        ([0, 1], {"reserved": [1]}, {}, r"shape \(1,\), expected \(2,\)"),
        ([0, 1], {"reserved": [1, -1]}, {}, "finite and >= 0"),
        ([0, 1], {"reserved": [1, NAN]}, {}, "finite and >= 0"),
        ([0, 1], {"reserved": [1, 11]}, {}, "is 11 at 1, above the capac"),
        (
            [0, 1],
            {"reserved": [6, 1], "internal": [6, 1]},
            {},
            "'the sum' is 12 at 0, above the capacity 10",
        ),
        ([0, 1], {"reserved": [0, 0]}, {"preemptions": [2]}, r"in \[0, 1\]"),
        ([0, 1], {"reserved": [0, 0]}, {"preemptions": [NAN]}, "finite"),
    ],
)
def test_pool_over_time_refuses_bad_input(times, split, options, message):
    with pytest.raises(ValueError, match=message):
        plots.pool_over_time(
            times, split, **{"capacity": 10, "title": "t"} | options
        )
    assert not plt.get_fignums()


# --- occupancy_lines -------------------------------------------------------


def test_occupancy_lines_draws_each_engine_over_its_own_times():
    fig = plots.occupancy_lines(
        {"paged": ([0, 1, 4], [5, 9, 7]), "max": ([0, 6], [2, 3])},
        capacity=10,
        title="t",
        kinds={"paged": "live"},
    )
    paged, reserve_max, capacity = fig.axes[0].get_lines()
    np.testing.assert_array_equal(paged.get_data(), ([0, 1, 4], [5, 9, 7]))
    np.testing.assert_array_equal(reserve_max.get_data(), ([0, 6], [2, 3]))
    assert paged.get_drawstyle() == "steps-post"
    assert paged.get_color() == plots.LIVE
    assert paged.get_linestyle() != reserve_max.get_linestyle()
    assert set(capacity.get_ydata()) == {10}
    assert [t.get_text() for t in end_labels(fig)] == ["paged", "max"]
    assert [t.xy for t in end_labels(fig)] == [(4, 7), (6, 3)]
    assert fig.axes[0].get_xlim() == (0, 6)


def test_occupancy_lines_bins_only_the_long_series():
    times = np.arange(3001)
    fig = plots.occupancy_lines(
        {"long": (times, times % 3), "short": ([0, 3000], [1, 2])},
        capacity=3,
        title="t",
    )
    long, short, _ = fig.axes[0].get_lines()
    # Bins of 3 steps: 0, 1 and 2 have the mean 1.
    np.testing.assert_allclose(long.get_ydata(), np.ones(1001))
    np.testing.assert_array_equal(short.get_ydata(), [1, 2])
    assert "3,001 points" in fig.get_supxlabel()


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ({}, {}, "1 to 8 series can be told apart, got 0"),
        ({str(i): ([0, 1], [1, 1]) for i in range(9)}, {}, "got 9"),
        ({"a": ([0], [1])}, {}, "times of 'a' needs 2 or more, got 1"),
        ({"a": ([1, 0], [1, 1])}, {}, "times of 'a' must rise"),
        ({"a": ([0, 1], [1])}, {}, "shape"),
        ({"a": ([0, 1], [1, 11])}, {}, "above the capacity 10"),
        ({"a": ([0, 1], [1, 1])}, {"preemptions": [-1]}, r"in \[0, 1\]"),
        ({"a": ([0, 1], [1, 1])}, {"kinds": {"a": "red"}}, "kind 'red'"),
        ({"a": ([0, 1], [1, 1])}, {"kinds": {"b": "live"}}, "not drawn"),
    ],
)
def test_occupancy_lines_refuses_bad_input(series, options, message):
    with pytest.raises(ValueError, match=message):
        plots.occupancy_lines(
            series, **{"capacity": 10, "title": "t"} | options
        )
    assert not plt.get_fignums()


# --- latency_against_load --------------------------------------------------


def draw_two(**options):
    return plots.latency_against_load(
        LOADS,
        {"paged": [1, 2, 3, 4, 50], "max": [1, 2, NAN, 9, NAN]},
        title="t",
        ylabel="ms",
        **options,
    )


def test_latency_draws_every_curve_and_leaves_a_gap_for_nan():
    fig = draw_two(kinds={"paged": "live", "max": "waste"})
    paged, reserve_max = fig.axes[0].get_lines()
    np.testing.assert_array_equal(paged.get_xdata(), LOADS)
    np.testing.assert_array_equal(paged.get_ydata(), [1, 2, 3, 4, 50])
    np.testing.assert_array_equal(reserve_max.get_ydata(), [1, 2, NAN, 9, NAN])
    assert paged.get_color() == plots.LIVE
    assert reserve_max.get_color() == plots.WASTE_DARK
    assert paged.get_marker() != reserve_max.get_marker()
    assert paged.get_markevery() == 1
    assert key_words(fig) == []


def test_latency_names_each_curve_at_its_last_measured_load():
    labels = {t.get_text(): t.xy for t in end_labels(draw_two())}
    assert labels == {"paged": (8, 50), "max": (6, 9)}


def test_latency_draws_the_upper_values_thin_in_the_curve_s_colour():
    high = [2, 4, 6, 8, 99]
    fig = draw_two(upper={"paged": high}, upper_label="p90")
    paged, upper, _ = fig.axes[0].get_lines()
    np.testing.assert_array_equal(upper.get_ydata(), high)
    assert upper.get_color() == paged.get_color()
    assert upper.get_linewidth() < paged.get_linewidth()
    (band,) = fig.axes[0].collections
    outline = band.get_paths()[0].vertices
    assert outline[:, 1].max() == 99
    assert outline[:, 1].min() == 1
    assert key_words(fig) == ["up to the p90 (thin line)"]


def test_latency_the_band_has_a_gap_where_nothing_was_measured():
    fig = draw_two(upper={"max": [2, 3, NAN, 10, NAN]})
    (band,) = fig.axes[0].collections
    x = np.concatenate([p.vertices[:, 0] for p in band.get_paths()])
    assert set(x) == {1, 2, 6}


def test_latency_draws_the_slo_across_the_picture():
    fig = draw_two(slo=20)
    line = fig.axes[0].get_lines()[-1]
    assert list(line.get_ydata()) == [20, 20]
    assert list(line.get_xdata()) == [0, 1]  # of the axes
    assert key_words(fig) == ["SLO 20"]
    assert key_words(draw_two(slo=20, slo_unit="ms")) == ["SLO 20 ms"]


def test_latency_axis_starts_at_zero_or_is_logarithmic():
    assert draw_two().axes[0].get_ylim()[0] == 0
    assert draw_two(logy=True).axes[0].get_yscale() == "log"


def test_latency_labels_do_not_overlap():
    fig = draw_latency()
    fig.canvas.draw()
    boxes = [Text.get_window_extent(t) for t in end_labels(fig)]
    assert len(boxes) == 8
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(b) for b in boxes[index + 1 :])


@pytest.mark.parametrize(
    ("loads", "curves", "options", "message"),
    [
        ([], {"a": []}, {}, "loads must be"),
        ([2, 1], {"a": [1, 1]}, {}, "loads must rise, got 1 after 2"),
        ([1, 2], {}, {}, "1 to 8 series"),
        ([1, 2], {"a": [1]}, {}, "shape"),
        ([1, 2], {"a": [NAN, NAN]}, {}, "all NaN"),
        ([1, 2], {"a": [1, math.inf]}, {}, "infinite"),
        ([1, 2], {"a": [1, -1]}, {}, "falls below 0"),
        ([1, 2], {"a": [1, 0]}, {"logy": True}, "'a' positive"),
        ([1, 2], {"a": [1, 1]}, {"upper": {"b": [2, 2]}}, "not drawn"),
        ([1, 2], {"a": [1, 1]}, {"upper": {"a": [2]}}, "shape"),
        (
            [1, 2],
            {"a": [NAN, 3]},
            {"upper": {"a": [1, 2]}},
            "falls below its curve",
        ),
        ([1, 2], {"a": [1, 1]}, {"kinds": {"a": "red"}}, "kind 'red'"),
        ([1, 2], {"a": [1, 1]}, {"kinds": {"b": "live"}}, "not drawn"),
    ],
)
def test_latency_refuses_bad_input(loads, curves, options, message):
    with pytest.raises(ValueError, match=message):
        plots.latency_against_load(
            loads, curves, title="t", ylabel="ms", **options
        )
    assert not plt.get_fignums()


# --- the key ---------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 13))
def test_the_key_takes_no_more_lines_than_it_needs(count):
    handles = [Line2D([], [], label="a label") for _ in range(count)]
    columns = serving._key_columns(handles)
    room = 7 * 72 - 2 * style._MARGIN
    entry = style._text_width("a label", 9) + serving._KEY_ROOM
    most = int(room // entry)
    assert -(-count // columns) == -(-count // min(count, most))
