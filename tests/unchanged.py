"""Compares what two versions of the package compute, so that a change of structure can be shown to change nothing else.

    python tests/unchanged.py write before          # with the version before the change
    python tests/unchanged.py compare before        # with the version after it, on the same machine

`write` saves one JSON file per section to a folder. `compare` computes the sections again, prints every value that
differs, and exits with 1 unless all differences are listed in `INTENDED`. To run an earlier version, check it out
elsewhere and name it first in PYTHONPATH. The script uses only commands, files and the public interface of the package,
because modules may move. Floats are compared bit by bit, and bits belong to one machine: commit no result.

Sections can be named to run only some of them: `python tests/unchanged.py compare before training layouts`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail

INTENDED: dict[str, str] = {
    r"/best$": "issue 41: among equal accuracies, the lower loss is better",
    r"standardised_error$|mean_absolute_error$": "issue 41: an error for each number, in its own unit",
    r"/metrics/\w+_images$|data_fingerprint$": "issue 41: runs state the number of images and the data they measured",
    r"^training/runs/\d+/settings/|^training/[^/]+/page/": "issue 41: settings are those in effect, and all of them",
    r"^outputs/finetune/report/(Held-out images$|The largest errors first|true: |predicted: |#%$)": "issue 42: the "
    "report of a run begins with held-out images",
    r"features\.json/several_labels$": "issue 42: files of a format that was never released are not read",
    r"^costs/.*/training_bytes$": "issue 41: kept bytes follow the formats in which the processor has dense layers",
}
"""Reasons for differences that are intended, by a regular expression of the value's name."""

VOLATILE = re.compile(
    r"time|seconds|_per_second|waiting|memory|limit|started|changed|machine|versions|created|flops_per|pid|host|"
    r"threads|path|^run$|origin|sha256|vitrail|^folder$|^out$|duration|speed|latency"
)
"""Names of values that differ between two runs of one version."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "COLUMNS": "80", "VITRAIL_FLOAT32_PRODUCTS": "mkl"}
DETERMINISTIC = ("--precision", "float32", "--compute-threads", "1", "--device", "cpu", "--threads", "2")


def command(*words: object, check: bool = True) -> str:
    """Run a command of the package. Return its standard output, or its exit code if `check` is false."""
    finished = subprocess.run(
        [sys.executable, "-m", "vitrail", *map(str, words)], capture_output=True, text=True, env=os.environ | ONE_THREAD
    )
    if not check:
        return str(finished.returncode)
    if finished.returncode:
        raise SystemExit(f"vitrail {' '.join(map(str, words))} ended with {finished.returncode}: {finished.stderr}")
    return finished.stdout


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def stable(value: Any) -> Any:
    """Return a JSON value without its volatile parts. Floats become text that holds all their bits."""
    if isinstance(value, dict):
        return {name: stable(inner) for name, inner in value.items() if not VOLATILE.search(name)}
    if isinstance(value, list):
        return [stable(inner) for inner in value]
    return value.hex() if isinstance(value, float) else value


def events(run: Path) -> list[Any]:
    """Return the events of a run. Losses and metrics keep their bits, and measurements of speed are left out."""
    return [stable(json.loads(line)) for line in (run / "journal.jsonl").read_text().splitlines()]


def weights(path: Path) -> dict[str, str]:
    """Return a hash of every tensor of a safetensors file."""
    return {name: sha(tensor.contiguous().numpy().tobytes()) for name, tensor in sorted(load_file(path).items())}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        if words := re.sub(r"[\d.,:]+", "#", " ".join(data.split())):
            self.found.append(words)


def text_of(page: Path) -> dict[str, bool]:
    """Return the texts of an HTML page, with # for every number. Charts are left out, because their axes show times."""
    parser = _Text()
    parser.feed(re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "", page.read_text()))
    return dict.fromkeys(parser.found, True)


def class_folders(root: Path, images: int = 16) -> Path:
    """Write class folders of PNG files of uneven sizes, whose colour tells the class."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (root / name).mkdir(parents=True)
        for number in range(images):
            pixels = random.integers(0, 200, (9 + number, 30 - number, 3), dtype=np.uint8)
            pixels[..., channel] += 55
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


def training(folder: Path) -> dict[str, Any]:
    """Return the events and weights of short runs: the demo, other tasks, an average, and a run that continues."""
    data = class_folders(folder / "data")
    tiny = ("--steps", 4, "--batch-size", 8, "--width", 16, "--depth", 2, "--heads", 2, "--mlp-width", 32)
    views = (*tiny, "--variant", "ViT-Pico/7", "--image-size", 28, 28, "--data", data)
    runs: dict[str, tuple[object, ...]] = {
        "demo": ("--steps", 10),
        "average": (*tiny, "--average", 0.9, "--optimizer", "sgd"),
        "muon": (*tiny, "--optimizer", "muon"),
        **{name: (*views, "--task", name) for name in ("mae", "masked-patches", "simclr", "dino", "moco")},
    }
    result: dict[str, Any] = {}
    for name, words in runs.items():
        command("train", *words, "--run", folder / name, *DETERMINISTIC)
        result[name] = {
            "events": events(folder / name),
            "files": sorted(str(path.relative_to(folder / name)) for path in (folder / name).rglob("*")),
            "weights": weights(folder / name / "model" / "model.safetensors"),
            "page": text_of(folder / name / "progress.html"),
        }
    command("train", "--resume", folder / "demo", "--steps", 12)
    result["continued"] = weights(folder / "demo" / "model" / "model.safetensors")
    result["runs"] = stable(json.loads(command("runs", folder, "--json")))
    return result


def formats(folder: Path) -> dict[str, Any]:
    """Return the losses of a short run on the same images in each format. They depend on the order of the keys, the
    labels and the pixels of all batches."""
    data = class_folders(folder / "classes")
    rows = sorted(data.rglob("*.png"))
    table = folder / "table.csv"
    table.write_text("path,label\n" + "".join(f"{row.relative_to(folder)},{row.parent.name}\n" for row in rows))
    lines = [{"file_name": str(row.relative_to(folder)), "label": row.parent.name} for row in rows]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers = folder / "numbers.csv"
    numbers.write_text("path,size\n" + "".join(f"{row.relative_to(folder)},{int(row.stem)}\n" for row in rows))
    shutil.copytree(data, folder / "splits" / "train")
    shutil.copytree(data, folder / "splits" / "val")
    command("data", "pack", data, folder / "shards", "--shard-size", 20_000)
    specs = {
        "bundled": "bundled[:200]", "classes": data, "part": f"{data}[:50%]", "splits": folder / "splits", "csv": table,
        "jsonl": folder / "lines.jsonl", "shards": folder / "shards", "fractals": "fractals:3:10",
    }  # fmt: skip
    small = ("--steps", 3, "--batch-size", 8, "--width", 16, "--depth", 1, "--heads", 2, *DETERMINISTIC)
    result = {}
    for name, spec in specs.items():
        command("train", "demo", "--data", spec, "--run", folder / "runs" / name, *small)
        result[name] = events(folder / "runs" / name)
    regression = ("--task", "regression", "--numbers", "size")
    command("train", "demo", "--data", numbers, *regression, "--run", folder / "runs" / "numbers", *small)
    result["numbers"] = events(folder / "runs" / "numbers")
    check = ("data", "check", folder / "splits", "--page", folder / "check.html", "--json")
    result["check"] = stable(json.loads(command(*check)))
    result["check page"] = text_of(folder / "check.html")
    return result


def costs(folder: Path) -> dict[str, Any]:
    """Return parameters, multiply-accumulates and memory of all variants and kinds of attention."""
    return {
        "models": json.loads(command("models", "--json")),
        "large": json.loads(command("models", "--image-size", 256, 160, "--batch-size", 8, "--json")),
        "layers": json.loads(command("models", "--layers", "--json")),
        "recipes": json.loads(command("recipes", "--json")),
    }


def _network(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    network = vitrail.create(name, num_classes=3, **settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def layouts(folder: Path) -> dict[str, Any]:
    """Return the logits of networks, and the files of every layout that can hold them."""
    small = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 64, "image_size": (24, 40)}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("ViT-Pico/8", {"image_size": (32, 32)}),
        "gap": ("ViT-Pico/8", {**small, "pool": "gap"}),
        "map": ("ViT-Pico/8", {**small, "pool": "map"}),
        "registers": ("ViT-Pico/8", {**small, "registers": 2, "layer_scale": 0.1}),
        "swiglu": ("ViT-Pico/8", {**small, "activation": "swiglu", "qk_norm": True}),
        "local": ("ViT-Pico/8", {**small, "attention": "local:window=3"}),
        "axial": ("ViT-Pico/8", {**small, "attention": "axial"}),
        "linformer": ("ViT-Pico/8", {**small, "attention": "linformer:rows=4"}),
        "lsh": ("ViT-Pico/8", {**small, "attention": "lsh:chunk=4"}),
        "rotary": ("ViT-Pico/8", {**small, "positions": "rotary-2d"}),
        "relative": ("ViT-Pico/8", {**small, "positions": "relative-bias"}),
        "reversible": ("ViT-Pico/8", {**small, "reversible": True}),
        "hybrid": ("Conv+ViT-Pico/8", small),
        "root": ("R+ViT-Ti/16", {"image_size": (32, 64), "depth": 1}),
        "bit": ("BiT-Pico", {"image_size": (24, 40)}),
        "resnet": ("BiT-R50x1", {"image_size": (32, 64)}),
    }
    images = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 3, 32, 40)).astype(np.float32))
    result: dict[str, Any] = {}
    for name, (variant, settings) in kinds.items():
        network = _network(variant, **settings)
        height, width = settings["image_size"]
        pixels = (
            images[..., :height, :width]
            if width <= 40 and height <= 32
            else images.repeat(1, 1, 1, 2)[..., :height, :width]
        )
        with torch.inference_mode():
            logits = network(pixels)
        loss = torch.nn.functional.cross_entropy(network.train()(pixels), torch.tensor([0, 1, 2]))
        loss.backward()
        gradients = b"".join(
            parameter.grad.numpy().tobytes() for parameter in network.parameters() if parameter.grad is not None
        )
        found: dict[str, Any] = {"logits": sha(logits.numpy().tobytes()), "gradients": sha(gradients)}
        torch.save(network.state_dict(), folder / f"{name}.pth")
        _bundle(network.eval(), (height, width)).save(folder / name)
        found["vitrail"] = _files(folder / name)
        for layout, suffix in (
            ("google", ".npz"), ("big-vision", ".npz"), ("bit", ".npz"), ("bit-torch", ".pth"), ("timm", ""),
            ("huggingface", ""), ("torchvision", ".pth"),
        ):  # fmt: skip
            target = folder / f"{name}-{layout}{suffix}"
            found[layout] = command("convert", folder / name, target, "--to", layout, check=False)
            if found[layout] == "0":
                found[f"{layout} files"] = _files(target)
        result[name] = found
    return result


def _bundle(network: Any, image_size: tuple[int, int]) -> Any:
    """Return a bundle with the preprocessing of the demo's recipe for colour images."""
    preprocess = type(vitrail.RECIPES["demo"]().images)(image_size=image_size)
    return vitrail.Bundle(network, ("red", "green", "blue"), preprocess)


def _files(path: Path) -> dict[str, Any]:
    """Return what the files of a model hold: hashes of tensors, and the values of JSON files."""
    found: dict[str, Any] = {}
    for file in [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file()):
        if file.suffix == ".safetensors":
            found[file.name] = weights(file)
        elif file.suffix == ".npz":
            with np.load(file) as arrays:
                found[file.suffix] = {name: sha(arrays[name].tobytes()) for name in sorted(arrays)}
        elif file.suffix == ".pth":
            state = torch.load(file, weights_only=True)
            found[file.suffix] = {
                name: sha(tensor.contiguous().numpy().tobytes()) for name, tensor in sorted(state.items())
            }
        elif file.suffix == ".json":
            found[file.name] = stable(json.loads(file.read_text()))
        else:
            found[file.name] = sha(file.read_bytes())
    return found


def outputs(folder: Path) -> dict[str, Any]:
    """Return the answers of commands about a model: predictions, metrics, features, pages, exit codes and HTTP."""
    data = class_folders(folder / "data")
    model = folder / "model-1"
    _bundle(_network("ViT-Pico/8", image_size=(32, 32)), (32, 32)).save(model)
    exact = ("--precision", "float32", "--device", "cpu")
    by = ("--by", "accuracy,linear,knn,fewshot", "--shots", 1, 5, "--per-class", "--confusion", "--no-cache", "--json")
    predicted = command("predict", model, data / "red", data / "blue", "--json", *exact)
    result: dict[str, Any] = {
        "predict": [stable(json.loads(line) | {"image": ""}) for line in predicted.splitlines()],
        "evaluate": stable(json.loads(command("evaluate", model, "--data", data, *by, *exact))),
    }
    command("embed", model, "--data", data, "--out", folder / "features", "--no-cache", *exact)
    result["embed"] = _files(folder / "features")
    tuned = ("--steps", 4, "--batch-size", 8, "--image-size", 32, 32, *DETERMINISTIC)
    command("finetune", model, "--data", data, "--run", folder / "tuned", *tuned)
    result["finetune"] = {"events": events(folder / "tuned"), "report": text_of(folder / "tuned" / "report.html")}
    command("report", model, "--data", data, "--out", folder / "inside", "--device", "cpu")
    command("explain", model, data / "red" / "00.png", "--out", folder / "explained")
    pages = [*folder.glob("inside/*.html"), *folder.glob("explained/*.html")]
    result["pages"] = {page.name: text_of(page) for page in sorted(pages)}
    refused = {
        "no data": ("train", "--data", folder / "missing"), "no model": ("predict", folder / "missing", data),
        "no recipe": ("train", "nothing"), "foreign": ("convert", model, data, "--to", "timm"),
        "range": ("train", "--learning-rate", -1), "no option": ("train", "--nothing", 1),
    }  # fmt: skip
    result["exit codes"] = {name: command(*words, check=False) for name, words in refused.items()}
    result["http"] = _answers(model, data / "green" / "03.png")
    return result


def _answers(model: Path, image: Path) -> dict[str, Any]:
    """Return the server's answers to some requests."""
    words = [sys.executable, "-m", "vitrail", "serve", str(model), "--port", "0", "--precision", "float32"]
    server = subprocess.Popen(
        words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=os.environ | ONE_THREAD
    )
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\w.:]+", line)))
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{address}/v2/health/ready").close()
                break
            except OSError:
                time.sleep(0.1)
        encoded = base64.b64encode(image.read_bytes()).decode()
        answers = {path: _asked(address + path) for path in ("/v2", "/models", "/v2/models/model-1", "/nothing")}
        answers["/"] = _asked(address, image.read_bytes(), "image/png")
        answers["/ json"] = _asked(address, json.dumps({"inputs": encoded, "parameters": {"top_k": 2}}).encode())
        answers["/v1/embeddings"] = _asked(f"{address}/v1/embeddings", json.dumps({"input": [encoded]}).encode())
        answers["not an image"] = _asked(address, b"text", "image/png")
        return answers
    finally:
        server.terminate()
        server.wait()


def _asked(url: str, body: bytes | None = None, content_type: str = "application/json") -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": content_type} if body else {})
    try:
        with urllib.request.urlopen(request) as answer:
            return [answer.status, stable(json.load(answer))]
    except urllib.error.HTTPError as error:
        return [error.code]


def options(folder: Path) -> dict[str, Any]:
    """Return the options of every command, with their defaults."""
    listed = command("--help")
    names = re.findall(r"^  ([a-z-]+(?: [a-z]+)?) {1,}[a-z]", listed, re.M)
    return {name: re.findall(r"^  (--[\w-]+)", command(*name.split(), "--help-all"), re.M) for name in names}


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    section.__name__: section for section in (training, formats, costs, layouts, outputs, options)
}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nested JSON value with its name."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from flat(inner, f"{name}/{key}")
    else:
        yield name, value


def differences(before: Any, after: Any, section: str) -> Iterator[str]:
    """Yield a line for every value that differs and that no intended change explains."""
    old, new = dict(flat(before, section)), dict(flat(after, section))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name, "absent") != new.get(name, "absent") and not any(re.search(one, name) for one in INTENDED):
            yield f"{name}: {str(old.get(name, 'absent'))[:80]} -> {str(new.get(name, 'absent'))[:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("folder", type=Path, help="folder of the results, one JSON file per section")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"sections to run: {', '.join(SECTIONS)}")
    given = parser.parse_args()
    if strange := sorted({*given.sections} - {*SECTIONS}):
        parser.error(f"{', '.join(strange)} is not one of the sections {', '.join(SECTIONS)}")
    os.environ.update(ONE_THREAD)
    torch.set_num_threads(1)
    print(f"vitrail of {Path(vitrail.__file__).parent}")
    found = 0
    for name in given.sections or SECTIONS:
        temporary = Path(tempfile.gettempdir(), "vitrail-unchanged")  # pages show the path
        temporary.mkdir()
        os.environ["VITRAIL_DATA"] = f"{temporary}/cache"
        try:
            result = json.loads(json.dumps(SECTIONS[name](temporary)))
        finally:
            shutil.rmtree(temporary)
        path = given.folder / f"{name}.json"
        if given.action == "write":
            given.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1))
            print(f"{name}: {len(dict(flat(result))):,} values written to {path}")
            continue
        lines = list(differences(json.loads(path.read_text()), result, name))
        found += len(lines)
        print(f"{name}: {len(dict(flat(result))):,} values, {len(lines)} differ")
        print("".join(f"  {line}\n" for line in lines[:40]), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
