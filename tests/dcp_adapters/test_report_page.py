"""The page of a report: well-formed, loading nothing, bounded, not broken by names; and drawn by a real browser."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from dcp_adapters.cli.report.drawing import snr_range
from dcp_adapters.cli.report.layers import grid_of, kind_and_layer, labels, middle_left_out
from dcp_adapters.cli.report.measure import measure_checkpoint
from dcp_adapters.cli.report.notes import notes
from dcp_adapters.cli.report.page import page
from dcp_adapters.cli.report.records import CheckpointReport, Outlier, Profile, ScaleHistogram, TensorReport
from dcp_adapters.stored.checkpoint import StoredCheckpoint
from dcp_adapters.stored.numeric_error import Error
from qtensor import NVFP4BlockScaling, quantize
from tests.dcp_adapters.cases import save, values

HOSTILE = [
    "<script>document.title='run'</script>",
    '"><img src=http://example.com/a.png onerror=alert(1)>',
    "</style></title><h1>'&amp;\"</h1>",
    "layers.1.\u202egnp.\x1b[31m\x00\ud800",
    "]]>--><!--",
]
VOID = {"meta", "wbr"}  # never closed


class Reader(HTMLParser):
    """The elements, attributes and text of a page; raises where elements are not closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "line")  # HTML knows this form in SVG alone
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def a_tensor(name: str, snr: float | None = 20.0, **fields: object) -> TensorReport:
    error = None if snr is None else Error(0.1, 10 ** (-snr / 20), 0)
    usual = {
        "kind": "nvfp4", "dtype": "bfloat16", "shape": (64, 64), "numel": 4096, "nbytes": 2308, "chunks": 1,
        "entries": 3, "quantized": True, "compared": "no" if snr is None else "yes", "error": error,
        "reference_bytes": 8192,
        "scales": (ScaleHistogram("scale", "e4m3", {3: 200, 4: 56}), ScaleHistogram("global_scale", "fp32", {-10: 1})),
        "at_largest": 300, "saturated": 44, "clipped": 0, "zero_rows": 0, "read_seconds": 0.001, "write_seconds": 0.002,
    }  # fmt: skip
    return TensorReport(name=name, **(usual | fields))


def a_report(tensors: list[TensorReport], **fields: object) -> CheckpointReport:
    usual = {"path": "runs/step-1", "against": "dense", "files": {"__0_0.distcp": 4000}, "format_version": 1}
    return CheckpointReport(tensors=tensors, **(usual | fields))


def outliers(factor: float) -> dict[str, object]:
    return {
        "outliers": (Outlier("column", 7, 3.0, factor),),
        "column_outliers": 1,
        "profile": Profile("column", 64, (1.0, factor)),
    }


@pytest.fixture
def hostile(tmp_path: Path) -> CheckpointReport:
    """A real checkpoint with such names, and everything that a page can show."""
    dense = {f"{name}.layers.{i}.w": values((64, 64), i) for name in HOSTILE[:3] + HOSTILE[4:] for i in range(2)}
    quantized = {name: quantize(x, NVFP4BlockScaling()) for name, x in dense.items()}
    next(iter(quantized.values())).scale.view(torch.uint8)[0, 0] = 0x7F
    dense["other"] = values((4, 4), 0)
    quantized["other"] = values((4, 4), 1)
    quantized["nobody's"] = torch.ones(3)
    save(quantized, tmp_path / "q")
    save(dense, tmp_path / "d")
    return measure_checkpoint(StoredCheckpoint(tmp_path / "q"), StoredCheckpoint(tmp_path / "d"))


# -- what is in it -----------------------------------------------------------------------------------------------------


def assert_loads_nothing(text: str) -> Reader:
    found = Reader(text)
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a", "use"} & set(found.elements)
    keys = {key for _, key, _ in found.attributes}
    assert not {"src", "href", "xlink:href", "srcset", "action", "background"} & keys
    assert not [key for key in keys if key.startswith("on")]
    styles = [value for _, key, value in found.attributes if key == "style"]
    assert all(re.fullmatch(r"width:[\d.e+-]+%", style) for style in styles)
    sheet = text.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in sheet
    assert "@import" not in sheet
    policy = next(value for _, key, value in found.attributes if key == "content" and "default-src" in value)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    return found


def test_names_do_not_become_markup(hostile: CheckpointReport) -> None:
    text = page(hostile)
    found = assert_loads_nothing(text)
    assert found.elements.count("h1") == 1
    assert "<script>document.title='run'</script>" in found.text
    assert "onerror=alert(1)" in found.text
    assert found.elements.count("svg") >= 3


def test_characters_that_steer_are_replaced() -> None:
    text = page(a_report([a_tensor(name) for name in HOSTILE], path=HOSTILE[3], against=HOSTILE[0]))
    assert not [one for one in text if one in "\u202e\x1b\x00\ud800"]
    text.encode()
    assert "\ufffdgnp.\ufffd[31m" in Reader(text).text.replace("gnp. ", "gnp.")


def test_names_are_escaped_once_in_text_and_in_attributes() -> None:
    assert page(a_report([])).endswith("</html>\n")
    name = "<&>'\"" * 20
    text = page(a_report([a_tensor(name, kind=name, **outliers(9.0))], files={name: 1}))
    assert "&lt;&amp;&gt;&#39;&#34;" in text
    assert "&amp;lt;" not in text
    titles = [value for tag, key, value in Reader(text).attributes if (tag, key) == ("span", "title")]
    assert len(titles) == 6
    assert set(titles) == {name}


def test_long_names_lose_their_middle() -> None:
    assert middle_left_out("a" * 10 + "b" * 90, 30) == "a" * 9 + "\u2026" + "b" * 20
    assert len(middle_left_out("a" * 1000, 72)) == 72


def test_all_sections_say_what_was_found(hostile: CheckpointReport) -> None:
    text = assert_loads_nothing(page(hostile)).text
    for heading in (
        "Quantization error",
        "Sizes",
        "Scales",
        "Outlier channels",
        "Saturation and NaN",
        "Cost of writing",
    ):
        assert heading in text
    assert "1 tensor with values that are NaN or infinite" in text
    assert "1 tensor not in what it is compared with, nobody's" in text
    assert "\ufffd" not in text
    assert "torch.save of the same bytes to nowhere" in text


def test_without_anything_to_compare_with_the_page_says_so() -> None:
    text = assert_loads_nothing(page(a_report([a_tensor("w", None)], against=None))).text
    assert "Not measured: that takes the values that are right (--against DENSE)." in text
    assert "not compared with anything" in text
    assert "lowest SNR" not in text


def test_a_page_about_next_to_nothing() -> None:
    nothing = assert_loads_nothing(page(a_report([], files={}, against=None))).text
    assert "no tensor is quantized" in nothing
    compared = assert_loads_nothing(page(a_report([]))).text
    assert "No tensor could be compared." in compared
    empty = {"numel": 0, "nbytes": 0, "shape": (0, 64), "at_largest": 0, "saturated": 0, "scales": ()}
    assert_loads_nothing(page(a_report([a_tensor("w", None, **empty)], files={"a": 0})))
    equal = a_report([a_tensor("w", None, error=Error(0.0, 0.0, 0), compared="yes")])
    assert "None: every value is equal to what it is compared with." in Reader(page(equal)).text
    odd = a_report([a_tensor("w", None, error=Error(1.0, None, 0), compared="yes")])  # the right values are all 0
    assert "inf" in assert_loads_nothing(page(odd)).text


def test_the_page_of_a_huge_checkpoint_is_bounded() -> None:
    tensors = [
        a_tensor(
            f"model.layers.{i % 500}.{'block' * 40}{i // 500}.experts.{i}.weight", 15 + i % 7, **outliers(5 + i % 90)
        )
        for i in range(5000)
    ]
    text = page(a_report(tensors, files={f"__{i}_0.distcp": 1000 + i for i in range(4096)}))
    found = assert_loads_nothing(text)
    assert len(text) < 1_000_000
    assert "and 4,988 more" in found.text
    assert "and 4,072 more" in found.text
    assert "5 layers share a column" in found.text
    many = [a_tensor(f"{'x' * 5000}{i}.kind{i}.weight", **outliers(9)) for i in range(3000)]
    text = page(a_report(many))
    assert len(text) < 300_000
    assert "2984 kinds of tensors with higher SNR are left out" in Reader(text).text


def test_notes_are_the_worst_first() -> None:
    report = a_report(
        [
            a_tensor("a", not_finite=3),
            a_tensor("b", scales=(ScaleHistogram("scale", "fp32", {}, negative=1),)),
            a_tensor("c", None, compared="shape"),
            a_tensor("d", None, compared="absent"),
            a_tensor("e", clipped=4, **outliers(6.0)),
            a_tensor("f", zero_rows=2),
            a_tensor("g", error=Error(0.0, 0.0, 0)),
            a_tensor("h.10", None, compared="undecodable"),
            a_tensor("h.9", None, compared="undecodable"),
        ],
        files={"__0_0.distcp": 900, "__1_0.distcp": 100},
        only_in_against=2,
    )
    assert [(note.level, note.words) for note in notes(report)] == [
        ("bad", "1 tensor with values that are NaN or infinite, a"),
        ("bad", "1 tensor with scales that are negative, NaN or infinite, b"),
        ("bad", "1 tensor of another shape in what it is compared with, c"),
        ("look", "1 tensor not in what it is compared with, d"),
        ("look", "2 tensors that can not be compared, for example h.9"),
        ("look", "1 tensor with clipped elements, e"),
        ("look", "1 tensor with rows of zeros, f"),
        ("look", "1 tensor with channels over 4\u00d7 the median of theirs, e"),
        ("look", "2 tensors only in what it is compared with"),
        ("look", "the largest file is 1.8\u00d7 the mean: its rank writes longest"),
        ("good", "1 tensor with every value equal to that compared with, g"),
    ]
    fine = notes(a_report([a_tensor("w")]))
    assert [note.words for note in fine] == ["no NaN, no infinity and no impossible scale in any tensor"]


# -- layers ------------------------------------------------------------------------------------------------------------


def test_names_as_kinds_and_layers() -> None:
    assert kind_and_layer("model.layers.12.mlp.experts.3.w1.weight") == ("model.layers.*.mlp.experts.*.w1.weight", 12)
    assert kind_and_layer("lm_head.weight") == ("lm_head.weight", None)
    assert kind_and_layer("h.99999999999999999999.w") == ("h.*.w", None)
    kinds = ["model.layers.*.q.weight", "model.layers.*.mlp.up.weight", "lm_head.weight"]
    assert labels(kinds) == {kinds[0]: "q", kinds[1]: "mlp.up", kinds[2]: "lm_head"}


def test_cells_show_the_lowest_of_their_tensors() -> None:
    tensors = [a_tensor(f"layers.{i}.experts.{e}.w", 20 + i - e) for i in range(3) for e in range(4)]
    tensors += [a_tensor("head", 11.0), a_tensor("layers.1.norm", error=Error(0.0, 0.0, 0))]
    tensors += [a_tensor("layers.2.absent", None)]
    grid = grid_of(tensors)
    assert grid.kinds == ("layers.*.experts.*.w", "head")
    assert (grid.layers, grid.per_column, grid.left_out) == ((0, 1, 2), 1, 0)
    assert {place: (cell.worst.name, cell.tensors) for place, cell in grid.cells.items()} == {
        ("layers.*.experts.*.w", 0): ("layers.0.experts.3.w", 4),
        ("layers.*.experts.*.w", 1): ("layers.1.experts.3.w", 4),
        ("layers.*.experts.*.w", 2): ("layers.2.experts.3.w", 4),
        ("head", None): ("head", 1),
    }


def test_many_layers_share_columns_and_the_worst_kinds_are_kept() -> None:
    grid = grid_of([a_tensor(f"layers.{10 * i}.w", 20 + i % 3) for i in range(250)])
    assert (grid.layers, grid.per_column) == (tuple(range(0, 2500, 30)), 3)
    first = grid.cells["layers.*.w", 0]
    assert (first.worst.name, first.tensors) == ("layers.0.w", 3)
    grid = grid_of([a_tensor(f"layers.0.kind{k}", 40 - k) for k in range(20)])
    assert (grid.kinds, grid.left_out) == (tuple(f"layers.*.kind{k}" for k in range(4, 20)), 4)


def test_small_differences_do_not_take_all_colours() -> None:
    assert snr_range([a_tensor("a", 20.4), a_tensor("b", 20.5)]) == pytest.approx((18.5, 20.5))
    assert snr_range([a_tensor("a", 10.0), a_tensor("b", 30.0)]) == pytest.approx((10.0, 30.0))


# -- a browser ---------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def browse(profile: Path, *arguments: str) -> str:
    quiet = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", *(f"--{flag}" for flag in quiet), "--disable-sync"),
            *(f"--user-data-dir={profile}", "--window-size=1240,1600", "--hide-scrollbars", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium and no google-chrome to draw the page with")
def test_a_browser_draws_it(hostile: CheckpointReport, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "page.html").write_text(page(hostile), encoding="utf-8")
    dom = browse(tmp_path / "1", "--dump-dom", f"file://{tmp_path}/page.html")
    assert "<title>Checkpoint report</title>" in dom  # no name was run as a script
    assert dom.count("<section>") == page(hostile).count("<section>") == 7
    for scheme in (0, 1):  # dark, light
        shot = tmp_path / f"{scheme}.png"
        browse(
            tmp_path / f"2{scheme}",
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={shot}",
            f"file://{tmp_path}/page.html",
        )
        pixels = image.imread(shot)[..., :3]  # [rows, columns, 3], 0 to 1
        assert pixels.shape[:2] == (1600, 1240)
        assert (pixels.mean() < 0.3) == (scheme == 0)
        # There is something in each quarter of the height, in the colours of the pictures too.
        assert all(quarter.std() > 0.01 for quarter in (pixels[i : i + 400] for i in range(0, 1600, 400)))
        blue = (pixels[..., 2] > pixels[..., 0] + 0.3).mean()
        orange = (pixels[..., 0] > pixels[..., 2] + 0.3).mean()
        assert blue > 0.005
        assert orange > 0.0005


def test_the_axis_of_a_profile_has_room_for_its_labels() -> None:
    def drawn(found: Profile) -> str:
        text = page(a_report([a_tensor("w", None, scales=(), **outliers(found.bins[-1]) | {"profile": found})]))
        return text.partition("<svg")[2].partition("</svg>")[0]

    for largest, expected in ((9.0, ["4", "1"]), (5000.0, ["4", "1", "16", "256", "2\u00b9\u00b2"])):
        labels = re.findall(r">([^<>]+)\u00d7<", drawn(Profile("row", 64, (1.0, largest))))
        assert labels == expected
    found = drawn(Profile("row", 64, (1.0, 3e16)))
    heights = sorted(float(y) for y in re.findall(r'y="([\d.]+)"[^<>]*>[^<>]+\u00d7<', found))
    assert 3 <= len(heights) <= 6
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 10
