"""Boxes by name, by number of them, and by their numbers; and which of them suits a model."""

import pytest

from stoker.errors import RequestError
from stoker.plan.answer import Question, answer, default_engine
from stoker.plan.catalog import GIB, boxes, find_box, find_model
from stoker.plan.speed import unseen
from stoker.plan.which_box import which_box

NAMES = {
    "4090": "rtx-4090", "5090": "rtx-5090", "pro-6000": "rtx-pro-6000", "mac": "mac-m3-ultra", "m4-max": "mac-m4-max",
    "Framework": "framework-desktop",
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_boxes_have_the_names_that_people_type(name: str, key: str) -> None:
    assert find_box(name).key == key


def test_so_many_of_a_box_have_so_much_of_everything() -> None:
    one, four = find_box("rtx-pro-6000"), find_box("4x rtx-pro-6000")
    assert (four.devices, four.of_rows) == (4, ("rtx-pro-6000", 4))
    assert four.visible_gib == 4 * one.visible_gib
    assert find_box("2 x spark").key == "2xspark"
    assert find_box("2x Spark").of_rows == ("spark", 2)
    assert find_box("3 × 5090").devices == 3
    with pytest.raises(RequestError, match="1 to 16"):
        find_box("99x spark")


def test_a_box_by_its_numbers_is_planned_like_the_one_that_has_them() -> None:
    said = find_box("mem=128GB,bw=273GB/s,tflops=125")
    assert (round(said.visible_gib * GIB / 1e9), said.bandwidth_gb_s, said.unified) == (128, 273, True)
    assert unseen(said) > 0
    assert not unseen(find_box("spark"))
    assert not unseen(find_box("framework-desktop"))  # a Strix Halo by another name
    assert find_box("mem=32GiB,bw=1.8TB/s").unified is False
    assert find_box("mem=24GB,bw=1000,n=2,unified=no").devices == 2
    mine = answer(Question("122b", "mem=128GB,bw=273GB/s,tflops=125", weights="int4", draft="none", context=4096))
    spark = answer(Question("122b", "spark", weights="int4", draft="none", context=4096))
    assert mine.speed.tokens_per_s == pytest.approx(spark.speed.tokens_per_s, rel=0.1)
    assert mine.speed.high / mine.speed.low > spark.speed.high / spark.speed.low


@pytest.mark.parametrize(
    ("text", "words"),
    [("mem=128GB", "mem and bw are needed"), ("mem=128GB,bw=fast", "bw=fast is no amount"),
     ("mem=1,bw=2,colour=red", "'colour'"),
     ("mem=0GB,bw=273GB/s", "no number above zero"), ("mem=64GB,bw=200GB/s,unified=maybe", "yes or no")],
)  # fmt: skip
def test_numbers_that_make_no_box_are_named(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        find_box(text)


def test_apple_and_amd_boxes_run_llama_cpp() -> None:
    model = find_model("122b")
    assert {default_engine(model, find_box(name)) for name in ("mac", "strix-halo", "framework")} == {"llama.cpp"}


def test_a_price_is_never_without_its_source() -> None:
    for box in boxes():
        assert (box.price_usd is None) == (not box.price_source), box.key
        assert box.price_usd is None or box.price_source.rstrip("0123456789-") != box.price_source, "the day is missing"


def test_which_box_says_what_fits_how_fast_by_whose_measurement_and_for_how_much() -> None:
    lines = {line.answer.box.key: line for line in which_box(Question("122b", "this"))}
    assert set(lines) == {box.key for box in boxes()}
    assert lines["spark"].answer.fits
    assert not lines["rtx-4090"].answer.fits
    assert lines["spark"].to_json()["price_usd"] == 4699
    assert "2026-06-28" in lines["spark"].to_json()["price_source"]
    assert lines["h200"].to_json()["price_usd"] is None
    assert all((row.box, row.boxes) == ("strix-halo", 1) for row in lines["framework-desktop"].evidence)
    assert lines["spark"].evidence
    speeds = [line.answer.speed.tokens_per_s for line in lines.values() if line.answer.fits]
    assert speeds == sorted(speeds, reverse=True)
