import math
import subprocess
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from llm_systems_cookbook import plots
from llm_systems_cookbook.plots import style

PARTS = ("token_states", "reserved", "internal", "external")
MAX = dict(zip(PARTS, (20.4, 13.3, 57.3, 8.9), strict=True))
PAGED = dict(zip(PARTS, (96.0, 0.0, 3.6, 0.0), strict=True))
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BOUND = [100 * (b - 1) / (b + 200) for b in SIZES]
HALF = [b / 2 for b in BOUND]
LONG = "A takeaway so long that it needs two lines, at the very least: 96 %"


def draw_grid(title=LONG):
    owners = [["A"], ["A", "B"], ["B"], [], ["A", "B", "C", "D"]] * 8
    filled = [16 if block else 0 for block in owners]
    filled[2] = 5
    return plots.pool_grid(owners, title=title, filled=filled, block_size=16)


def draw_tables(title=LONG):
    return plots.block_tables(
        {
            "parent": ([0, 3, 5, 2, 9, 11, 13, 15], 118),
            "child": ([0, 3, 5, 4, 6, 1, 7, 8], 120),
            "C": ([0, 3, 5, 10, 12], 66),
        },
        num_blocks=16,
        block_size=16,
        title=title,
    )


def draw_refcounts(title=LONG):
    return plots.refcounts([2, 1, 0] * 7, [1, 1, 1] * 7, title=title)


def draw_programs(title=LONG):
    steps = [[[7, 2], [5], [1], [12], [3, 4], [6], [8], [9, 10, 11, 13]]] * 5
    names = ["A, head 0", "A, head 1", "A, a head with a name too long to fit"]
    programs = {
        f"{names[i % 3]} {i}": ("AB"[i % 2], 0, steps[i]) for i in range(5)
    }
    return plots.program_grid(programs | {"C": ("C", 1, [])}, title=title)


def draw_split(title=LONG):
    return plots.split_bars(
        {"reserve max": MAX, "paged, block 16": PAGED},
        title=title,
        reference={"reserve max": MAX, "paged, block 16": {}},
        source="paper: Kwon et al., SOSP 2023, Fig. 2",
    )


def draw_used(title=LONG):
    return plots.used_and_wasted(
        {"reserve 4096": (3.0, 97.0), "blocks of 16": (94.1, 5.9)},
        title=title,
    )


def draw_waste(title=LONG):
    return plots.waste_by_block_size(
        SIZES,
        {"Azure, conversation": HALF, "Mooncake": HALF},
        BOUND,
        expected=HALF,
        title=title,
    )


def draw_lines(title=LONG):
    x = [1, 2, 4, 8]
    return plots.lines(
        x,
        {f"series number {i}": [v + i / 100 for v in x] for i in range(8)},
        title=title,
        xlabel="tokens",
        ylabel="reads",
        logx=True,
        logy=True,
    )


def draw_bars(title=LONG):
    return plots.bars(
        {"OPT-13B": 819200, "Llama-3-8B, with 8 key-value heads": 131072},
        title=title,
        unit="bytes per token",
    )


DRAWINGS = [
    draw_grid,
    draw_tables,
    draw_refcounts,
    draw_programs,
    draw_split,
    draw_used,
    draw_waste,
    draw_lines,
    draw_bars,
]


@pytest.fixture(autouse=True)
def _agg():
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module", params=DRAWINGS)
def figure(request):
    """Return each drawing, made once: only for tests that just look."""
    return request.param()


def texts(fig):
    return [t.get_text() for t in fig.findobj(Text) if t.get_text().strip()]


def areas(fig, colour=None):
    """Return the filled rectangles, of one colour or of all."""
    found = [r for ax in fig.axes for r in ax.patches]
    found = [r for r in found if isinstance(r, Rectangle) and r.get_fill()]
    if colour is None:
        return found
    return [r for r in found if to_hex(r.get_facecolor()) == colour.lower()]


def outlines(fig):
    found = [r for ax in fig.axes for r in ax.patches]
    return [r for r in found if isinstance(r, Rectangle) and not r.get_fill()]


# --- all figures -----------------------------------------------------------


def test_title_is_the_takeaway_at_the_left(figure):
    assert figure.get_suptitle().replace("\n", " ") == LONG
    assert figure._suptitle.get_ha() == "left"


@pytest.mark.parametrize("draw", DRAWINGS)
def test_nothing_is_cut_off_even_with_a_note(draw):
    fig = draw()
    plots.note(fig, "Generated from the trace's quantiles, not the trace.")
    fig.canvas.draw()
    box = fig.get_tightbbox()
    assert box.x0 >= -0.01
    assert box.y0 >= -0.01
    assert box.x1 <= fig.get_figwidth() + 0.01
    assert box.y1 <= fig.get_figheight() + 0.01


def test_text_is_nine_points_or_more(figure):
    sizes = [t.get_size() for t in figure.findobj(Text) if t.get_text()]
    assert min(sizes) >= 9


def test_figure_is_opaque_white_seven_inches_wide(figure):
    assert figure.get_facecolor() == (1, 1, 1, 1)
    assert figure.get_figwidth() == 7
    assert figure.dpi == 100


def test_figure_belongs_to_pyplot():
    fig = draw_bars()
    assert plt.get_fignums() == [fig.number]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_rcparams_and_backend_are_left_alone(draw):
    plt.switch_backend("svg")
    with plt.style.context("dark_background"):
        before = dict(mpl.rcParams)
        draw()
        assert dict(mpl.rcParams) == before
    assert mpl.get_backend().lower() == "svg"


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_dark_style_of_the_reader_changes_nothing(draw):
    with plt.style.context("dark_background"):
        fig = draw()
        fig.canvas.draw()
        charts = [ax for ax in fig.axes if ax.axison]
        ticks = [t for ax in charts for t in ax.get_xticklabels()]
    assert fig.get_facecolor() == (1, 1, 1, 1)
    assert fig.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert {to_hex(t.get_color()) for t in ticks} <= {plots.INK.lower()}


def test_every_orange_area_is_hatched(figure):
    orange = [
        area
        for colour in (plots.WASTE, plots.WASTE_LIGHT, plots.WASTE_DARK)
        for area in areas(figure, colour)
    ]
    assert all(area.get_hatch() for area in orange)
    rest = [area for area in areas(figure) if area not in orange]
    assert not any(area.get_hatch() for area in rest)


def test_text_on_every_fill_has_a_contrast_of_four_and_a_half():
    fills = [plots.WASTE_LIGHT, plots.WASTE_DARK]
    fills += [*style._FILL.values(), *style._LIVE_SHADES]
    for fill in fills:
        pair = (
            style._luminance(fill),
            style._luminance(style._text_on(fill)),
        )
        assert (max(pair) + 0.05) / (min(pair) + 0.05) >= 4.5, fill


@pytest.mark.parametrize(
    "module", ["pool", "steps", "charts", "serving", "style"]
)
def test_each_module_imports_alone_without_torch_or_a_backend(module):
    code = (
        "import sys, matplotlib as m; m.use('template');"
        f"import llm_systems_cookbook.plots.{module};"
        "print('torch' in sys.modules, m.get_backend())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["False", "template"]


def test_dollar_signs_are_not_read_as_mathematics():
    fig = plots.bars({"a $x": 1}, title="from $2 to $1", unit="$")
    fig.canvas.draw()
    assert not any(
        t.get_parse_math() for t in fig.findobj(Text) if t.get_text()
    )


# --- pool_grid -------------------------------------------------------------


def test_pool_grid_colours_each_block_by_its_owners():
    fig = plots.pool_grid([["A"], [], ["A", "B"], ["A"], []], title="t")
    key = 1  # the swatch below the grid
    assert len(areas(fig, plots.LIVE)) == 2 + key
    assert len(areas(fig, plots.SHARED)) == 1 + key
    assert len(areas(fig, plots.FREE)) == 2 + key
    assert not areas(fig, plots.WASTE)
    written = texts(fig)
    assert written.count("A") == 2
    assert "A+B" in written
    assert all(str(block) in written for block in range(5))


def test_pool_grid_tells_owners_apart_by_the_lightness_of_the_blue():
    fig = plots.pool_grid([["A"], ["B"], ["A"]], title="t")
    one, two, three = areas(fig)[:3]
    assert one.get_facecolor() == three.get_facecolor()
    assert one.get_facecolor() != two.get_facecolor()
    assert to_hex(two.get_facecolor()) in map(str.lower, style._LIVE_SHADES)


def test_pool_grid_fills_a_cell_in_proportion():
    fig = plots.pool_grid([["A"], []], title="t", filled=[4, 0], block_size=16)
    (cell, _) = areas(fig, plots.LIVE)
    (waste, _) = areas(fig, plots.WASTE)
    assert waste.get_width() == pytest.approx(cell.get_width() * 12 / 16)
    right = cell.get_x() + cell.get_width()
    assert waste.get_x() + waste.get_width() == pytest.approx(right)


def test_pool_grid_breaks_rows_at_the_columns():
    fig = plots.pool_grid([["A"]] * 10, title="t", columns=4)
    cells = areas(fig, plots.LIVE)[:10]
    assert len({round(c.get_y(), 3) for c in cells}) == 3
    assert len({round(c.get_x(), 3) for c in cells}) == 4


def test_pool_grid_counts_owners_whose_names_do_not_fit():
    fig = plots.pool_grid([list("ABCDEFGH")] * 16, title="t")
    assert texts(fig).count("×8") == 16


@pytest.mark.parametrize(
    ("owners", "options", "message"),
    [
        ([["A", "A"]], {}, "twice"),
        ([["A"]], {"filled": [1]}, "come together"),
        ([["A"]], {"block_size": 4}, "come together"),
        ([["A"]], {"filled": [1, 2], "block_size": 4}, "shorter|longer"),
        ([["A"]], {"filled": [5], "block_size": 4}, r"5, outside \[0, 4\]"),
        ([["A"]], {"filled": [-1], "block_size": 4}, "outside"),
        ([[]], {"filled": [1], "block_size": 4}, r"1, outside \[0, 0\]"),
    ],
)
def test_pool_grid_refuses_bad_input(owners, options, message):
    with pytest.raises(ValueError, match=message):
        plots.pool_grid(owners, title="t", **options)
    assert not plt.get_fignums()


# --- block_tables ----------------------------------------------------------

FOUR = ["Four", "score", "and", "seven", "years", "ago", "our"]
FOUR += ["fathers", "brought"]


def test_block_tables_draws_an_arrow_per_table_entry_to_its_block():
    fig = plots.block_tables(
        {"A": ([7, 1, 3], 9)}, num_blocks=9, block_size=4, title="t"
    )
    arrows = [p for p in fig.axes[0].patches if not isinstance(p, Rectangle)]
    outlines = [arrow.get_path().vertices for arrow in arrows]
    starts = [points[points[:, 0].argmin(), 1] for points in outlines]
    tips = [points[points[:, 0].argmax(), 1] for points in outlines]
    assert len(arrows) == 3
    assert starts == sorted(starts)
    assert tips[1] < tips[2] < tips[0]  # blocks 1, 3, 7


def test_block_tables_writes_each_token_in_logical_and_physical_slot():
    fig = plots.block_tables(
        {"A": ([7, 1, 3], 9)},
        num_blocks=9,
        block_size=4,
        title="t",
        tokens={"A": FOUR},
    )
    written = texts(fig)
    assert all(written.count(token) == 2 for token in FOUR)
    assert "A: 9 tokens" in written


def test_block_tables_hatches_the_slots_that_hold_no_token():
    fig = plots.block_tables(
        {"A": ([7, 1, 3], 9)}, num_blocks=9, block_size=4, title="t"
    )
    logical, physical, _ = sorted(
        areas(fig, plots.WASTE), key=lambda r: -r.get_width()
    )
    whole = areas(fig, plots.FREE)[0].get_width()
    assert logical.get_width() == pytest.approx(whole * 3 / 4)
    assert physical.get_width() == pytest.approx(whole * 3 / 4)


def test_block_tables_colours_a_shared_block_on_both_sides():
    fig = plots.block_tables(
        {"A": ([0, 1], 8), "B": ([0, 2], 8)},
        num_blocks=4,
        block_size=4,
        title="t",
    )
    shared = areas(fig, plots.SHARED)
    assert len(shared) == 1 + 2 + 1  # the pool, two tables, the key
    assert "A+B" in texts(fig)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ({"A": ([4], 1)}, {}, r"block 4 is outside \[0, 4\)"),
        ({"A": ([-1], 1)}, {}, "outside"),
        ({"A": ([1, 1], 5)}, {}, "listed twice"),
        ({"A": ([1], 5)}, {}, r"length 5 is outside \[0, 4\]"),
        ({"A": ([1], -1)}, {}, "outside"),
        ({"A": ([1], 1)}, {"tokens": {"B": []}}, "'B' is not in tables"),
        ({"A": ([1], 1)}, {"tokens": {"A": []}}, "0 texts for 1 tokens"),
    ],
)
def test_block_tables_refuses_bad_input(tables, options, message):
    sizes = {"num_blocks": 4, "block_size": 4} | options
    with pytest.raises(ValueError, match=message):
        plots.block_tables(tables, title="t", **sizes)
    assert not plt.get_fignums()


# --- refcounts -------------------------------------------------------------


def test_refcounts_outlines_what_changed_and_nothing_else():
    fig = plots.refcounts([2, 1, 0], [1, 1, 1], title="t")
    key = 1
    assert len(outlines(fig)) == 2 * 2 + key
    assert not outlines(plots.refcounts([1, 0], [1, 0], title="t"))


def test_refcounts_writes_counts_in_boxes_of_their_meaning():
    fig = plots.refcounts([7, 1], [6, 0], title="t", labels=("was", "is"))
    assert {"7", "6", "was", "is", "changed"} <= set(texts(fig))
    key = 1
    assert len(areas(fig, plots.SHARED)) == 2 + key
    assert len(areas(fig, plots.LIVE)) == 1 + key
    assert len(areas(fig, plots.FREE)) == 1 + key


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1], [1, 2], "shorter|longer"),
        ([1], [-1], "after: block 0 has a negative count -1"),
    ],
)
def test_refcounts_refuses_bad_input(before, after, message):
    with pytest.raises(ValueError, match=message):
        plots.refcounts(before, after, title="t")


# --- split_bars and used_and_wasted ----------------------------------------


def test_program_grid_writes_the_blocks_of_each_step_in_order():
    fig = plots.program_grid({"one": ("A", 0, [[7, 2], [5]])}, title="t")
    written = texts(fig)
    assert {"one", "step 1", "step 2"} <= set(written)
    assert written.index("7+2") < written.index("5")
    assert "step 3" not in written


def test_program_grid_hatches_what_the_programs_above_have_read():
    fig = plots.program_grid(
        {
            "first": ("A", 0, [[7], [2]]),
            "same head": ("A", 0, [[7], [3]]),
            "other head": ("A", 1, [[7]]),
        },
        title="t",
    )
    key = 1
    assert len(areas(fig, plots.WASTE)) == 1 + key
    assert len(areas(fig, plots.LIVE)) == 4 + key
    assert "read again for the same KV head" in texts(fig)


def test_program_grid_a_program_does_not_repeat_itself():
    fig = plots.program_grid({"one": ("A", 0, [[7], [7]])}, title="t")
    assert not areas(fig, plots.WASTE)
    assert "read again for the same KV head" not in texts(fig)


def test_program_grid_a_step_with_any_new_block_is_not_hatched():
    fig = plots.program_grid(
        {"one": ("A", 0, [[7]]), "two": ("A", 0, [[7, 8]])}, title="t"
    )
    assert not areas(fig, plots.WASTE)


def test_program_grid_tells_sequences_apart_and_says_who_has_no_work():
    fig = plots.program_grid(
        {"a": ("A", 0, [[0]]), "b": ("B", 0, [[1]]), "c": ("B", 0, [])},
        title="t",
    )
    blues = [areas(fig, shade) for shade in style._LIVE_SHADES[:2]]
    assert [len(found) for found in blues] == [1 + 1, 1]  # and the key
    assert texts(fig).count("nothing to read") == 1


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({"p": ("A", 0, [[1], []])}, "p: step 2 reads no block"),
    ],
)
def test_program_grid_refuses_bad_input(programs, message):
    with pytest.raises(ValueError, match=message):
        plots.program_grid(programs, title="t")
    assert not plt.get_fignums()


def test_split_bars_widths_are_the_shares():
    fig = plots.split_bars({"max": MAX}, title="t")
    ax = fig.axes[0]
    background, *segments = areas(fig)
    assert background.get_width() == 100
    assert [s.get_width() for s in segments] == list(MAX.values())
    starts = [s.get_x() for s in segments]
    assert starts == pytest.approx([0, 20.4, 33.7, 91.0])
    assert [to_hex(s.get_facecolor()) for s in segments] == [
        c.lower()
        for c in (
            plots.LIVE,
            plots.WASTE_LIGHT,
            plots.WASTE,
            plots.WASTE_DARK,
        )
    ]
    assert len({s.get_hatch() for s in segments[1:]}) == 3
    assert ax.get_xlim() == (0, 100)


def test_split_bars_labels_the_segments_that_have_room():
    small = MAX | {"reserved": 2.9}
    written = texts(plots.split_bars({"max": small}, title="t"))
    assert {"20.4", "57.3", "8.9", "internal"} <= set(written)
    assert not any(text.startswith("2.9") for text in written)


def test_split_bars_draws_the_reference_thinner_below():
    fig = plots.split_bars(
        {"max": MAX},
        title="t",
        reference={"max": {"token_states": 20.0}},
        source="Kwon et al., 2023",
    )
    own, paper = areas(fig, plots.LIVE)
    assert paper.get_width() == 20.0
    assert paper.get_height() < own.get_height()
    assert paper.get_y() > own.get_y()  # the y axis points down
    assert {"max", "paper", "Kwon et al., 2023"} <= set(texts(fig))


@pytest.mark.parametrize(
    ("splits", "reference", "message"),
    [
        ({"a": MAX | {"lost": 1}}, None, r"unknown parts \['lost'\]"),
        ({"a": {"token_states": 1.0}}, None, "missing parts"),
        ({"a": MAX | {"reserved": -1}}, None, "got -1"),
        ({"a": MAX | {"reserved": math.nan}}, None, "got nan"),
        ({"a": MAX | {"reserved": 20}}, None, "sum to 106.6 %"),
        ({"a": MAX}, {"b": MAX}, "'b' is not in splits"),
        ({"a": MAX}, {"a": {"lost": 1}}, "reference a: unknown"),
    ],
)
def test_split_bars_refuses_bad_input(splits, reference, message):
    with pytest.raises(ValueError, match=message):
        plots.split_bars(splits, title="t", reference=reference)
    assert not plt.get_fignums()


def test_used_and_wasted_bars_add_up_to_the_pool():
    fig = draw_used()
    live, waste = areas(fig, plots.LIVE), areas(fig, plots.WASTE)
    assert [r.get_width() for r in live] == [3.0, 94.1]
    assert [r.get_width() for r in waste] == [97.0, 5.9]
    assert [r.get_x() for r in waste] == [3.0, 94.1]
    assert {"3.0 % used", "97.0 % wasted", "5.9 % wasted"} <= set(texts(fig))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"a": (50, 40)}, "must be 100 %, got 90"),
        ({"a": (-1, 101)}, "got -1"),
        ({"a": (math.inf, 0)}, "got inf"),
    ],
)
def test_used_and_wasted_refuses_bad_input(pairs, message):
    with pytest.raises(ValueError, match=message):
        plots.used_and_wasted(pairs, title="t")


# --- lines -----------------------------------------------------------------


def label_boxes(fig):
    fig.canvas.draw()
    found = [t for t in fig.findobj(Annotation) if t.get_text()]
    # Without the leader: get_window_extent of a Text, not of the Annotation.
    return [Text.get_window_extent(t) for t in found]


@pytest.mark.parametrize("draw", [draw_lines, draw_waste])
def test_labels_at_the_line_ends_do_not_overlap(draw):
    boxes = label_boxes(draw())
    assert len(boxes) >= 4
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            assert not box.overlaps(other)


@pytest.mark.parametrize("names", [["high", "low"], ["low", "high"]])
@pytest.mark.parametrize("end", [1, 1.001])
def test_lines_that_end_in_one_point_are_named_in_their_order(names, end):
    values = {"high": [2, 2, end], "low": [0.5, 0.5, 1]}
    values = {name: values[name] for name in names}
    fig = plots.lines([1, 2, 3], values, title="t", xlabel="x", ylabel="y")
    at = {t.get_text(): t.xyann[1] for t in fig.axes[0].texts}
    assert at["high"] > at["low"]


def test_a_line_that_ends_early_is_named_at_its_end():
    values = {"whole": [1, 1, 1, 1], "early": [2, 2, np.nan, np.nan]}
    fig = plots.lines([1, 2, 3, 4], values, title="t", xlabel="x", ylabel="y")
    (early,) = (t for t in fig.axes[0].texts if t.get_text() == "early")
    assert early.xy == (2, 2)
    assert early.anncoords == "offset points"
    assert early.arrow_patch is None


def test_points_at_one_height_are_named_where_there_is_room():
    nan = np.nan
    values = {
        "first": [nan, 1, nan, nan, nan, nan, nan],
        "middle": [nan, nan, 1, nan, nan, nan, nan],
        "last": [nan, nan, nan, 1, nan, nan, nan],
        "whole": [3] * 7,
    }
    x = list(range(7))
    fig = plots.lines(x, values, title="t", xlabel="x", ylabel="y")
    at = {t.get_text(): t for t in fig.axes[0].texts}
    assert at["first"].anncoords == "axes fraction"  # no room at the left
    assert at["middle"].anncoords == at["whole"].anncoords == "axes fraction"
    assert at["last"].xyann == (5, 0)
    values.pop("middle")
    values["first"], values["second"] = (
        [nan, nan, 1, nan, nan, nan, nan],
        values.pop("last"),
    )
    fig = plots.lines(x, values, title="t", xlabel="x", ylabel="y")
    at = {t.get_text(): t.xyann for t in fig.axes[0].texts}
    assert (at["first"], at["second"]) == ((-5, 0), (5, 0))


def test_spread_keeps_the_order_and_the_distance():
    placed = style._spread([0.99, 0.5, 0.98, 0.97], 0.1)
    assert placed == pytest.approx([1.0, 0.5, 0.9, 0.8])
    assert style._spread([0.1, 0.9], 0.1) == [0.1, 0.9]


def test_waste_by_block_size_draws_the_data_on_a_binary_axis():
    fig = plots.waste_by_block_size(
        SIZES, HALF, BOUND, expected=HALF, title="t"
    )
    ax = fig.axes[0]
    bound, expected, measured = ax.get_lines()
    np.testing.assert_allclose(bound.get_ydata(), BOUND)
    np.testing.assert_allclose(expected.get_ydata(), HALF)
    np.testing.assert_allclose(measured.get_ydata(), HALF)
    assert measured.get_color() == plots.WASTE_DARK
    assert ax.get_xscale() == "log"
    assert ax.xaxis.get_transform().base == 2
    fig.canvas.draw()
    ticks = [t.get_text() for t in ax.get_xticklabels()]
    assert ticks == [str(size) for size in SIZES]
    assert {"exact bound", "expected", "measured"} <= set(texts(fig))


def test_a_short_logarithmic_axis_has_numbers_to_read_values_off():
    fig = plots.lines(
        [1, 2],
        {"a": [4.0, 30.0]},
        title="t",
        xlabel="x",
        ylabel="y",
        logy=True,
    )
    fig.canvas.draw()
    (ax,) = fig.axes
    low, high = ax.get_ylim()
    inside = [
        label.get_text()
        for at, label in zip(
            ax.get_yticks(), ax.get_yticklabels(), strict=True
        )
        if low <= at <= high
    ]
    assert inside == ["5", "10", "20"]


@pytest.mark.parametrize(
    ("sizes", "measured", "bound", "message"),
    [
        ([], [], [], "1 or more finite"),
        ([0, 1], [1, 1], [1, 1], ">= 1 and rising"),
        ([2, 2], [1, 1], [1, 1], ">= 1 and rising"),
        ([1, 2], [1], [1, 1], r"'measured' has shape \(1,\)"),
        ([1, 2], [1, 1], [1], "'exact bound' has shape"),
        ([1, 2], [1, -1], [1, 1], "falls below 0"),
        ([1, 2], [1, math.inf], [1, 1], "infinite"),
        ([1, 2], {}, [1, 1], "got 0"),
    ],
)
def test_waste_by_block_size_refuses_bad_input(
    sizes, measured, bound, message
):
    with pytest.raises(ValueError, match=message):
        plots.waste_by_block_size(sizes, measured, bound, title="t")
    assert not plt.get_fignums()


def test_lines_differ_by_more_than_colour():
    drawn = draw_lines().axes[0].get_lines()
    assert len({line.get_marker() for line in drawn}) == 8
    assert len({line.get_linestyle() for line in drawn}) == 4


def test_lines_take_the_colour_of_their_kind():
    fig = plots.lines(
        [1, 2],
        {"a": [1, 2], "b": [2, 1]},
        title="t",
        xlabel="x",
        ylabel="y",
        kinds={"b": "live"},
    )
    neutral, live = fig.axes[0].get_lines()
    assert live.get_color() == plots.LIVE
    assert neutral.get_color() == plots.INK


def test_lines_leave_a_gap_for_nan_and_label_the_last_point():
    fig = plots.lines(
        [1, 2, 3], {"a": [1, 5, math.nan]}, title="t", xlabel="", ylabel=""
    )
    (label,) = [t for t in fig.findobj(Annotation) if t.get_text() == "a"]
    assert label.xy == (2, 5)


@pytest.mark.parametrize(
    ("x", "series", "options", "message"),
    [
        ([], {"a": []}, {}, "x must be"),
        ([1], {}, {}, "1 to 8 series"),
        ([1], {str(i): [1] for i in range(9)}, {}, "got 9"),
        ([1, 2], {"a": [1]}, {}, "shape"),
        ([1], {"a": [math.nan]}, {}, "all NaN"),
        ([0], {"a": [1]}, {"logx": True}, "logx"),
        ([1], {"a": [0]}, {"logy": True}, "'a' positive"),
        ([1], {"a": [1]}, {"kinds": {"a": "red"}}, "unknown kind 'red'"),
        ([1], {"a": [1]}, {"kinds": {"b": "live"}}, "not drawn"),
    ],
)
def test_lines_refuses_bad_input(x, series, options, message):
    with pytest.raises(ValueError, match=message):
        plots.lines(x, series, title="t", xlabel="", ylabel="", **options)
    assert not plt.get_fignums()


# --- bars and note ---------------------------------------------------------


def test_bars_have_the_widths_labels_and_colours_of_the_data():
    fig = plots.bars(
        {"paged": 30.42, "max": 7, "prefix": 1234},
        title="t",
        unit="requests",
        kind={"max": "waste", "prefix": "shared"},
    )
    assert [r.get_width() for r in areas(fig)] == [30.42, 7, 1234]
    assert [to_hex(r.get_facecolor()) for r in areas(fig)] == [
        plots.LIVE.lower(),
        plots.WASTE.lower(),
        plots.SHARED.lower(),
    ]
    written = set(texts(fig))
    assert {"30.4 requests", "7 requests", "1,234 requests"} <= written
    assert {"paged", "max", "prefix"} <= written


def test_bars_of_zero_are_drawn_and_labelled():
    fig = plots.bars({"a": 0, "b": 0}, title="t", unit="")
    fig.canvas.draw()
    assert texts(fig).count("0") >= 2


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"a": -1}, "live", "got -1"),
        ({"a": math.nan}, "live", "got nan"),
        ({"a": 1}, "red", "unknown kind 'red'"),
        ({"a": 1}, {"b": "live"}, "not drawn"),
    ],
)
def test_bars_refuses_bad_input(values, kind, message):
    with pytest.raises(ValueError, match=message):
        plots.bars(values, title="t", unit="", kind=kind)
    assert not plt.get_fignums()


def test_notes_stack_below_the_figure_and_cover_nothing():
    fig = draw_bars()
    height = fig.get_figheight()
    plots.note(fig, "first: " + "conditions " * 20)
    plots.note(fig, "second")
    assert fig.get_figheight() > height
    assert fig.get_supxlabel().startswith("first")
    assert fig.get_supxlabel().endswith("second")
    fig.canvas.draw()
    note = fig._supxlabel.get_window_extent()
    assert note.y0 >= 0
    assert note.x1 <= fig.bbox.width
    assert note.y1 <= fig.axes[0].get_tightbbox().y0


def test_a_blank_note_is_refused():
    fig = draw_bars()
    with pytest.raises(ValueError, match="blank"):
        plots.note(fig, " ")


def test_every_figure_of_a_notebook_is_shown_not_only_the_first():
    """The inline backend is chosen inside the first call."""
    import nbformat
    from nbclient import NotebookClient

    draw = "plots.pool_grid([[], ['A']], title='{}');"
    sources = [
        "from llm_systems_cookbook import plots",
        draw.format("first"),
        draw.format("second"),
        "import matplotlib.pyplot as plt; plt.plot([1, 2]);",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3").execute()
    shown = [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert shown == [0, 1, 1, 1]
