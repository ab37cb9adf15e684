"""Wrong calls of all commands. Each is refused with exit code 2 and a message, and nothing is written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.make import (
    dense_bundle,
    make_bundle,
    make_colour_folder,
    make_idx_folder,
    make_masks_folder,
    make_voc_folder,
    tiny_config,
)
from tests.words import model_with_words
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.resnet import ResNet
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.variants import create
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.run import train
from vitrail.weights.bundle import Bundle

COLOURS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the models and the data that the calls name."""
    root = tmp_path_factory.mktemp("place")
    make_voc_folder(root / "voc")
    make_masks_folder(root / "masks")
    make_colour_folder(root / "colours")
    make_colour_folder(root / "few", images=1)
    make_idx_folder(root / "digits", train=20, test=4)
    _write_tables(root)
    _write_models(root)
    for name in ("empty", "hollow/bare", "single/only", "taken", "flat", "folder.npz", "triton-models/headless/mine"):
        (root / name).mkdir(parents=True)
    shutil.copy(root / "colours/red/00.png", root / "single/only/a.png")
    for name in ("0.png", "1.png"):
        shutil.copy(root / "colours/red/00.png", root / "flat" / name)
    shutil.copytree(root / "colours", root / "sites/first site")
    shutil.copytree(root / "colours", root / "sites/second site")
    for split in ("train", "test"):
        shutil.copytree(root / "colours", root / "split" / split)
    (root / "file.txt").write_text("")
    (root / "annotations.json").write_text('{"images": []}')
    (root / "real.json").write_text(json.dumps([[]] * 50_000))
    suite = 'name = "one"\n[evaluators.linear]\n[[tasks]]\nname = "gone"\ngroup = "a"\nwhere = "nowhere"'
    (root / "one.toml").write_text(suite)
    record = {
        "format": 2, "config": RECIPES["demo"]().to_plain(), "data": {"fingerprint": "0", "train": 16, "classes": []},
        "objects": ["network"],
    }  # fmt: skip
    (root / "own").mkdir()
    (root / "own/run.json").write_text(json.dumps(record))
    (root / "frozen").mkdir()
    frozen = TrainConfig().override(data="colours", init="model", train_blocks=0).to_plain()
    (root / "frozen/run.json").write_text(json.dumps({**record, "config": frozen, "objects": []}))
    run = {"steps": 1, "evaluations": 1, "validation_share": 0.0, "keep": "last"}
    train(tiny_config(data=root / "digits", run=root / "run", **run))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (root / "port").write_text(str(taken.getsockname()[1]))
        yield root


def _write_tables(root: Path) -> None:
    """Write a table with the brightness and the width of images, one without labels, and one that names no file."""
    rows = ["file,brightness,width,kind"]
    for number in range(40):
        Image.new("RGB", (9 + number, 14), (6 * number,) * 3).save(root / f"{number}.png")
        rows.append(f"{number}.png,{6 * number},{'' if number == 7 else 9 + number},{'ab'[number % 2]}")
    (root / "grey.csv").write_text("\n".join(rows))
    (root / "unlabelled.csv").write_text("path,label\n1.png,\n2.png,\n")
    (root / "list.csv").write_text("path\n1.png\n2.png\n")
    (root / "gone.csv").write_text("path\n1.png\ngone.png\n")


def _write_models(root: Path) -> None:
    """Write models of classes, of boxes, of masks, of numbers, of texts, and without a head."""
    make_bundle(num_classes=3).save(root / "classifier")
    make_bundle(num_classes=3, pool="gap", class_token=False).save(root / "pooled")
    dense_bundle().save(root / "boxer")
    dense_bundle("patches").save(root / "masker")
    model_with_words().save(root / "words")
    model_with_words(bias=-3.0).save(root / "sigmoid")
    torch.manual_seed(0)
    for name, classes in {
        "model": COLOURS,
        "grouped": (*COLOURS, "owl"),
        "headless": (),
        "other/model": COLOURS,
    }.items():
        network = create("ViT-Pico/7", image_size=(14, 21), num_classes=len(classes), width=16, depth=2, heads=2,
                         mlp_width=32)  # fmt: skip
        Bundle(network, classes, Preprocess(image_size=(14, 21))).save(root / name)
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=2, width=16, depth=1, heads=2, mlp_width=32)
    Bundle(network, ("brightness", "width"), Preprocess(image_size=(14, 21)), output="numbers").save(root / "numbers")
    resnet = ResNet(ResNetConfig(depths=(1,), width=32, num_classes=2, image_size=(33, 40)))
    Bundle(resnet, ("a", "b"), Preprocess(image_size=(33, 40))).save(root / "resnet")


KINDS = {
    "evaluate boxer --data voc --by linear": "this data has boxes",
    "evaluate boxer --data voc --by fewshot": "this data has boxes",
    "evaluate masker --data masks --by knn": "this data has masks",
    "evaluate boxer --data voc --by accuracy": "this data has boxes",
    "evaluate boxer --data colours": "has one class per image, but the model predicts boxes",
    "evaluate boxer --data masks": "has a mask per image, but the model predicts boxes",
    "evaluate masker --data voc": "has boxes of objects, but the model predicts masks",
    "evaluate classifier --data voc": "has boxes of objects, but the model predicts classes",
    "evaluate classifier --data masks --by accuracy": "has a mask per image, but the model predicts classes",
    "evaluate boxer classifier --data voc": "has boxes of objects, but the model predicts classes",
    "evaluate boxer --data voc --confusion": "this model predicts boxes",
    "predict boxer voc/JPEGImages/001.png --top 2": "--top",
    "optimize boxer --data voc": "a model that predicts boxes cannot be made faster",
    "optimize classifier --data voc": "has boxes of objects, but the model predicts classes",
    "report boxer --data voc": "a model that predicts boxes cannot be reported on",
    "report classifier --data masks": "has a mask per image, but the model predicts classes",
    "compare boxer masker --data voc": "a model that predicts boxes cannot be compared",
    "data label colours --teacher boxer --out labels": "outputs 'boxes'",
    "train folder --task distillation --teacher classifier --data voc --run new": "boxes of objects",
    "train folder --task distillation --teacher masker --data colours --run new": "outputs 'mask'",
    "noisy-student --data few --unlabelled colours --pseudo-ratio 1e308": "--pseudo-ratio: 1e+308 is not in",
    "noisy-student --teacher boxer --data colours --unlabelled voc --run new": "outputs 'boxes'",
    "noisy-student --teacher classifier --data voc --unlabelled colours --run new": "boxes of objects",
    "convert boxer boxer.safetensors --to timm": "head_kind='pyramid'",
}
"""Models and data of boxes, masks and classes that do not fit."""

BENCH = {
    "bench": "usage: vitrail bench",
    "bench training": "train|infer|load: 'training' is not one of train, infer, load",
    "bench train --precision fp8": "--precision: 'fp8' is not one of",
    "bench train --scaling heads": "--scaling: 'heads' is not one of",
    "bench train ViT-Pico/7 --repetitions 0": "--repetitions: 0 is less than 1",
    "bench train ViT-Pico/7 --warmup -1": "--warmup: -1 is less than 0",
    "bench infer ViT-Pico/7 --batch-size 0": "--batch-size: 0 is less than 1",
    "bench infer ViT-Pico/7 --threads 0": "--threads: 0 is not in [1, 4096]",
    "bench infer ViT-Pico/7 --threads 99999": "--threads: 99999 is not in [1, 4096]",
    "bench train ViT-Pico": "unknown variant 'ViT-Pico'",
    "bench train ViT-Pico/7 --image-size 30 28": "the nearest multiple is (28, 28)",
    "bench train ViT-Pico/7 --width 97": "--width: 97",
    "bench train ViT-Pico/7 --patch-dropout 1": "--patch-dropout: 1.0 is not in [0, 1)",
    "bench train BiT-R50x1 --heads 2": "unknown field 'heads' of BiT-R50x1",
    "bench train ViT-Pico/7 --num-classes 0": "--num-classes: 0 leaves nothing to train",
    "bench train ViT-Pico/7 --against ,": "--against: ',' names nothing",
    "bench train ViT-Pico/7 --attention ,": "--attention: ',' names nothing",
    "bench train ViT-Pico/7 --against timn": "unknown library 'timn' in --against; nearest: timm",
    "bench train BiT-R50x1 --against timm": "a BiT ResNet has no counterpart",
    "bench load ViT-Pico/7 --against timm": "--against: bench load does not use it",
    "bench load ViT-Pico/7 --compile off": "--compile: bench load does not use it",
    "bench train ViT-Pico/7 --scaling batch --best": "--scaling and --best exclude each other",
    "bench train ViT-Pico/7 --compile on --scaling batch": "--scaling and --compile exclude each other",
    "bench train ViT-Pico/7 --attention axial,lsh": "--attention axial,lsh: several kinds are compared only by",
    "bench train ViT-Pico/7 --attention axial,lsh --scaling tokens --image-size 28 28":
        "--image-size: --attention with several kinds does not use it",
    "bench infer ViT-Pico/7 --largest-batch": "--largest-batch: bench infer does not use it",
    "bench train ViT-Pico/7 --memory-limit 1GB": "--memory-limit: it limits only --largest-batch",
    "bench train ViT-Pico/7 --largest-batch --memory-limit lots": "--memory-limit: 'lots' is not",
    "bench train ViT-Pico/7 --largest-batch --memory-limit 999TB --device cpu":
        "--memory-limit 999000000000000: a step of that size needs",
    "bench train ViT-Pico/7 --batch-size 1 --scaling batch": "needs at least two values",
    "bench train ViT-Pico/7 --compile graphs --device cpu": "--compile: 'graphs' needs CUDA, but this device",
    "bench train BiT-R50x1 --compile on": "--compile: 'on' compiles a transformer's blocks",
    "bench infer ViT-Pico/7 --precision float8 --device cpu": "--precision: 'float8'",
    "bench infer ViT-Pico/7 --precision int8": "--precision: 'int8' is not one of",
    "bench train ViT-Pico/7 --reduce-tokens 1": "--reduce-tokens: bench train does not use it",
    "bench load ViT-Pico/7 --reduce-tokens 1": "--reduce-tokens: bench load does not use it",
    "bench infer ViT-Pico/7 --patch-dropout 0.5": "--patch-dropout: bench infer does not use it",
    "bench load ViT-Pico/7 --patch-dropout 0.5": "--patch-dropout: bench load does not use it",
    "bench infer BiT-R50x1 --reduce-tokens 1": "unknown field 'reduction' of BiT-R50x1",
    "bench load ViT-Pico/7 --channels 4": "--channels: 4 is not one of 1, 3",
    "bench load --batch-size 8": "--batch-size: bench load does not use it; leave --batch-size out",
    "bench train --largest-batch --batch-size 8": "--batch-size: --largest-batch does not use it",
    "bench train --scaling batch --no-profile": "--profile: --scaling does not use it",
    "bench infer ViT-Pico/7 --image-size 28 21 --batch-size 1000000000000 --device cpu":
        "--batch-size: 1000000000000 needs more memory than cpu has",
    "bench data --images 0": "--images: 0 is less than 1",
    "bench data --processes -1": "--processes: -1 is less than 0",
    "bench data --entries 0": "--entries: 0 is not in [2, 100000000]",
    f"bench data --entries {'9' * 30}": "is not in [2, 100000000]",
    "bench data --entries 5000 --batch-size 3": "--entries: it measures only the opening of a folder; leave --batch",
    "bench data nowhere": "data 'nowhere' does not exist",
    "bench serve --clients 0": "--clients: 0 is not in [1, 10000]",
    "bench data --threads 10000": "--threads: 10000 is not in [0, 4096]",
    "bench serve --clients --rates": "leave nothing to measure",
    "bench serve --against naive,litserv": "--against: 'litserv' does not exist; nearest: litserve",
    "bench serve model --requests 10 --rates 0.5": "--rates: it has an effect only without --requests",
    "bench serve --against litserve": "--against litserve: ModuleNotFoundError: No module named 'litserve'. Install",
    "bench serve --environment litserve=python": "--environment: 'litserve' is not a library of the servers to measure",
    "bench serve --against litserve --environment litserve=no/python": "no/python cannot be run as the Python",
    "bench serve --against litserve --environment litserve": "--environment: 'litserve' is not LIBRARY=PATH",
    "bench serve --rounds 0": "--rounds: 0 is less than 1",
    "bench serve --requests -1": "--requests: -1 is less than 0",
    "bench serve --requests 9 --clients": "--requests: 9 needs a number of clients",
    "bench serve ViT-S/17x": "ViT-S/17x",
    "bench accuracy": "RECIPE... is missing",
    "bench accuracy demi": "recipe 'demi' does not exist; nearest: demo",
    "bench accuracy masked-patches": "recipe 'masked-patches' trains the task masked-patches, which has no accuracy",
    "bench accuracy demo demo": "RECIPE...: demo is given twice",
    "bench accuracy demo:epoch=1": "recipe 'demo:epoch=1': 'epoch' is no setting to compare; nearest: epochs",
    "bench accuracy demo:seed=1": "recipe 'demo:seed=1': 'seed' is no setting to compare",
    "bench accuracy demo:validation-share=0.3": "'validation_share' is no setting to compare",
    "bench accuracy demo:epochs": "recipe 'demo:epochs': epochs has no value; give epochs=VALUE",
    "bench accuracy demo:epochs=1,": "recipe 'demo:epochs=1,': '' is no setting to compare",
    "bench accuracy demo:,": "'' is no setting to compare; give NAME=VALUE",
    "bench accuracy demo:epochs=5,epochs=3": "recipe 'demo:epochs=5,epochs=3': epochs is given twice",
    "bench accuracy demo:steps=2,epochs=3": "--steps and --epochs exclude each other",
    "bench accuracy demo:name=x": "'name' is no setting to compare",
    "bench accuracy demo:max-time=1s": "'max_time' is no setting to compare",
    "bench accuracy demo:evaluations=3 --evaluations 2": "recipe 'demo:evaluations=3': 'evaluations' is no setting",
    "bench accuracy demo:patience=20": "--patience: it has an effect only below the number of --evaluations",
    "bench accuracy demo:patience=15 --data no/data": "data 'no/data' does not exist",
    "bench accuracy demo:probe-every=5": "--probe-every: it has an effect only with --probe",
    "bench accuracy demo:epochs=soon": "recipe 'demo:epochs=soon': --epochs: 'soon' is not a number",
    "bench accuracy demo:epochs=-1": "recipe 'demo:epochs=-1': epochs=-1.0 is not above 0",
    "bench accuracy demo:flip=yes": "recipe 'demo:flip=yes': flip='yes' is neither on nor off",
    "bench accuracy demo:image-size=x": "recipe 'demo:image-size=x': --image-size: 'x' is not a whole number",
    "bench accuracy demo --targets 0.8 1.2": "--targets: 1.2 is not in (0, 1); give a fraction, such as 0.85 for 85 %",
    "bench accuracy demo --budget -1m": "--budget: '-1m' is not a time; give a number above 0 with a unit",
    "bench accuracy demo --targets nan": "--targets: nan is not in (0, 1)",
    "bench accuracy demo --seeds 1 1": "--seeds: 1 is given twice; give each value once",
    "bench accuracy demo --seeds": "--seeds: needs N ...",
    "bench accuracy demo --seeds -1": "--seeds: -1 is not in [0, 4294967296)",
    "bench accuracy demo --evaluations 0": "--evaluations: 0 is less than 1",
    "bench accuracy demo --budget soon": "--budget: 'soon' is not a time; give a number above 0 with a unit",
    "bench accuracy demo --budget best": "--budget: 'best' is not a time; give a number above 0 with a unit, such as",
    "bench accuracy demo --against timn": "unknown library 'timn' in --against; nearest: timm",
    "bench accuracy demo --against timm --environment timm": "--environment: 'timm' is not LIBRARY=PATH",
    "bench accuracy demo --against timm --environment timm=a timm=b": "--environment: timm is given twice",
    "bench accuracy demo --against timm --environment timm=/no/python": "/no/python cannot be run as the Python",
    "bench accuracy demo --data nowhere": "nowhere",
    "bench accuracy demo --validation-share 0": "--validation-share: 0.0 leaves data 'bundled' without a validation",
}  # fmt: skip

TINY = "--width 16 --depth 1 --heads 2 --mlp-width 16 --device cpu"

TRAIN = {
    "train dmo": "recipe 'dmo' does not exist; nearest: demo, dino, moco; data is named with --data",
    "train photos": "recipe 'photos' does not exist; vitrail recipes lists all; data is named with --data",
    "train ViT-S/16 --data photos": "'ViT-S/16' does not exist; to train a network, name it with --variant ViT-S/16",
    "train none/photos": "'none/photos' does not exist; to train on data, name it with --data: vitrail train --data ",
    "train 'sites/first site' --epochs 3": "name it with --data: vitrail train --data 'sites/first site'",
    "train 'sites/first site' --help": "name it with --data: vitrail train --data 'sites/first site'",
    "train photos --data bundled": "recipe 'photos' does not exist; vitrail recipes lists all",
    "train --lerning-rate 1": "--lerning-rate: vitrail train has no such option; nearest: --learning-rate",
    "train --lr 1": "nearest: --learning-rate",
    "train --data none": "none' does not exist",
    "train --data bundeld": "nearest: bundled",
    "train --data empty": "has no class folders",
    "train --data single": "has only one class, 'only'",
    "train --data hollow": "has no images",
    "train --data file.txt": "has an unknown file format",
    "train --data sites --run new": "--splits train=first site,test=second site",
    f"train {TINY} --variant Conv+ViT-Pico/8 --image-size 28 30": (
        "of a feature map at 1/2; the nearest multiple is (32, 32)"
    ),
    f"train {TINY} --heads 5": "--width: 16 is not divisible by --heads 5",
    "train --variant ViT-Q/7": "size 'Q' does not exist; nearest",
    "train --variant vit-s-16": "have the form ViT-SIZE/PATCH, R50+ViT-SIZE/PATCH or BiT-R50x1; nearest: ViT-S/16",
    "train --precision fp8": "fp8",
    "train --batch-size 0": "--batch-size: 0 is less than 1",
    "train --steps many": "--steps: 'many' is not a whole number",
    "train --learning-rate -1": "--learning-rate: -1.0 is not above 0",
    "train --warmup 2": "--warmup: 2.0 is not in [0, 1)",
    "train --warmup '2 weeks'": "--warmup: '2 weeks' is not a length; write for example 0.1 (a fraction of the run)",
    "train --steps 20 --warmup '21 steps'": "--warmup: '21 steps' is 21 steps, more than the 20 steps of the",
    "train --schedule staircase": "--schedule: 'staircase' needs --stair-at",
    "train --device abacus": "--device: 'abacus' cannot be used here",
    "train --run taken": "exists; choose another --run",
    "train --run file.txt/run": "file.txt is not a folder; choose another path",
    "train --run taken --overwrite": "is not the folder of a run",
    "train --keep best --validation-share 0": "--keep: 'best' needs a validation split",
    "train --resume missing": "is not the folder of a run: it has no run.json",
    "train --resume missing --seed 9": "--seed: a run that --resume continues keeps its settings, and only --epochs or",
    "train --resume missing --steps 9 --epochs 2": "give only one of them",
    "train --resume run --steps 1": "has 1 steps (",
    "train --allow data": "--allow: only a run that --resume continues can change settings; leave --allow out",
    "train --like nowhere": "'nowhere' is not the folder of a run",
    "train demo --like nowhere": "'nowhere' is not the folder of a run",
    "train --like frozen --dropout 0.1": "--dropout: 0.1 is for blocks that are trained, but all of them are frozen",
    "train --like own": "cannot be repeated, because it was started in Python with its own network",
    "train --max-time soon": "--max-time: 'soon' is not a time",
    "train --init model --variant ViT-S/16": "--variant: 'ViT-S/16' cannot be given with --init 'model'",
    "train --init model --train-blocks 3 --run new": "--train-blocks: 3 is more than the 2 blocks of the model",
    "train --init model --lora-rank 2 --lora-on fc1": "query",
    "train --init ./model/nowhere": "does not exist",
    "train --train-blocks 0": "--train-blocks: 0 leaves weights untrained, so it needs a model to start from",
    "train --task regression": "--numbers: the task regression needs the names of numeric columns, such as --numbers",
    "train --task regresion": "--task: 'regresion' is not one of classification, regression",
    "train --data grey.csv --numbers brightness --loss softmax": "--loss: 'softmax' is not one of squared, huber",
    "train --data grey.csv --numbers brightness --label-smoothing 0.1": "--label-smoothing: the task of this run, regr",
    "train --data grey.csv --loss huber": "--loss: 'huber' is not one of softmax, sigmoid",
    "train --data grey.csv --numbers kind": "column 'kind' holds 'a', which is not a finite number",
    "train --data grey.csv --numbers wdth": "has no column 'wdth' of numbers; nearest: width",
    "train --task mae --data colours --remove-fraction 1": "--remove-fraction: 1.0 is not between 0 and 1",
    "train --task masked-patches --label-smoothing 0.1": "--label-smoothing: the task of this run, masked-",
    "train --task simclr --loss sigmoid": "--loss: the task of this run, simclr, has no such setting",
    "train --task detection": "task detection; leave it out, or choose --erase 0 in place of the recipe's",
    "train --task detection --erase 0": "data 'bundled' has no boxes of objects, which detection learns; choose other "
    "data; --data names your own",
    "train vit-b16-jft": "data set has this name (choices: bundled, fashion-mnist, fractals:CLASSES:SAMPLES, "
    "hf:ORG/NAME, scenes:SAMPLES); --data names your own",
    "train --task detection --data voc --head-normalises": "--head-normalises: True is for a linear model of",
    "train --task clip --text-width 257": "--text-width: 257 is not divisible by its 4 heads",
    "train --task mae --freeze image": "--freeze: the task of this run, mae, has no such setting",
    "train --task clip --select image_to_text_1 --keep last": "--select: it has an effect only with --keep best or",
    "train --channels 1 --colour-jitter 0 0 0.2 0": "--colour-jitter: it has an effect only with a saturation",
    **dict.fromkeys(
        (
            "train --width 1000000000000000000000", "train --depth 1000000000", "train --head-bias 1e308",
            "train --layer-scale 1e308", "train --shift 1000000000000000000000", "train --crop-from 10000000000",
            "train --randaugment-layers 1000000000000", "train --task dino --prototypes 1000000000000000000000",
            "train --task simclr --projection-width 1000000000000000000000", "train --task vqvae --codes 100000000000",
        ),
        "is not in [",
    ),
    "train --scale-jitter 1 1e308": "--scale-jitter: 1.0 1e+308 is not two numbers in (0, 100]",
    "train --task segmentation --data masks --head-kind queries --query-blocks 1 --attention windows":
        "--attention: 'windows' is not one of",
    "train --optimizer sgd --momentum 0 --momentum-format bfloat16": "--momentum-format: it has an effect only with",
    "train --interpolation nearest --no-antialias": "--antialias: it has an effect unless --interpolation is nearest",
    "train --task detection --data voc --box-weight inf": "--box-weight: inf is not a finite number",
    "train --task segmentation --data masks --dice-weight inf": "--dice-weight: inf is not a finite number",
    "train --schedule staircase --stair-at 0.5 --stair-factors inf": "--stair-factors: inf is not a finite number",
    "train --task mae --solarise 0 0.2": "--solarise: 2 numbers for 1 view",
    "train --task simclr --blur 1 0.1 0.5": "--blur: 3 numbers for 2 views",
    "train --task dino --local-views 0 --blur 1 0.1 0.5": "--blur: 3 numbers for 2 views",
    "train --task dino --local-views 0 --local-size 8": "--local-size: it has an effect only with --local-views",
    "train --task dino --local-views 0 --local-crop-area 0.1 0.2": "--local-crop-area: it has an effect only with",
    "train --task dino --target-temperature-epochs 0 --target-temperature-start 0.5":
        "--target-temperature-start: it has an effect only with --target-temperature-epochs",
    "train --task dino --target-temperature-epochs 0 --target-temperature-by step":
        "--target-temperature-by: it has an effect only with --target-temperature-epochs",
    "train --task dino --target-temperature-epochs 0 --patch-weight 1 --patch-temperature-start 0.5":
        "--patch-temperature-start: it has an effect only with --patch-weight and --target-temperature-epochs",
    "train --task dino --centring masked-mean": "--centring: it has an effect only with --patch-weight",
    "train --task dino --centring sinkhorn --centre-momentum 0.5": "--centre-momentum: it has an effect unless",
    "train --task dino --target-temperature-epochs 2": "it has an effect only if --target-temperature-start",
    "train --task dino --mask-fraction 0.1 0.5": "--mask-fraction: it has an effect only with --patch-weight",
    "train --mask-fraction 0.1 0.5 dino": "'dino' is one argument too many after '0.5'; usage: vitrail train [RECIPE]",
    "train dino --mask-fraction 0.1": "--mask-fraction: needs X X",
    "train --task distillation --teacher model --teacher-temperature 9":
        "--teacher-temperature: it has an effect only with --teacher-labels soft",
    "train --task simclr --init model --linear-head": "--linear-head: True is for a head, but the task simclr has none",
    "train --task distillation --teacher m --teacher-weight 1 --label-smoothing 0.3":
        "--label-smoothing: it has an effect only with --teacher-weight below 1",
    "train --task clip --text-tokenizer words --text-context 8": "--text-context: it has an effect unless",
    "train --task siglip --text-tokenizer words --text-context 8": "--text-context: it has an effect unless",
    "train --task clip --text-tokenizer words --vocabulary 600": "--vocabulary: it has an effect unless",
    "train --task siglip --data grey.csv --init sigmoid --initial-bias -2":
        "--initial-bias: the initial model has a text tower",
    "train --data colours --init model --train-blocks 0 --backbone-wait 0.3": "--backbone-wait: it has an effect only",
    "train --task siglip --data grey.csv --init sigmoid --freeze image --layer-decay 0.5":
        "--layer-decay: it has an effect only with trained",
    "train --task clip --data flat": "flat has images without texts",
    "train --task masked-patches --patch-target token": "--patch-target: 'token' is not one of mean-colour, colours,",
    "train --task masked-patches --patch-target tokens": "--patch-target 'tokens' needs a trained tokenizer; name a",
    "train --task masked-patches --patch-target tokens --tokenizer nowhere": "'nowhere' cannot be loaded: ",
    "train --task masked-patches --tokenizer runs/vqvae": "'runs/vqvae' is not used with patch_target='colours'",
    "train --task masked-patches --corrupt-fraction 1": "--corrupt-fraction: 1.0 is not between 0 and 1",
    "train --task masked-patches --variant Conv+ViT-Pico/8 --image-size 32 32": "the tokens of a hybrid do",
    "train --task masked-patches --mixup 0.2": "--mixup: 0.2 mixes the labels of images",
    "train --task distillation --data colours": "--teacher: the task distillation needs a trained model to learn from",
    "train --task distillation --data colours --teacher ./none": "--teacher: './none' cannot be loaded",
    "train --task distillation --data colours --teacher grouped --run new": "has other classes than",
    "train --task distillation --data colours --teacher model --loss sigmoid": "'sigmoid' cannot be distilled",
    "train folder --data colours --variant ViT-S/16 --image-size 96 128 --plan": "--plan: needs N ...",
    "train folder --data colours --variant ViT-S/16 --image-size 96 128 --plan 12":
        "--plan: 12 is not a number of GPUs in machines of 8",
    "train folder --data colours --variant ViT-S/16 --image-size 96 128 --plan 8 --precision float32":
        "--precision: 'float32' has no plan; choose bf16",
    "train --data colours --plan 8": "name a recipe, such as vitrail train folder --data colours --plan 8",
    "train --data colours --plan 8 --budget 1m": "--plan and --budget exclude each other",
    "train --init no/model --data no/data --learning-rate -1": "--learning-rate: -1.0 is not above 0",
    "train --init no/model --data no/data --train-blocks -1": "--train-blocks: -1 is less than 0",
    "train --init no/model --data no/data --device nope": "--device: 'nope' cannot be used here",
    "train --init no/model --data no/data --run taken": "run folder 'taken' exists",
    "train --data no/data --probe-every 5": "--probe-every: it has an effect only with --probe",
    "train --data no/data --momentum 0.5": "--momentum: it has an effect only with --optimizer sgd, lars",
    "train --data no/data --optimizer sgd --beta2 0.5": "--beta2: it has an effect only with --optimizer adamw, lamb",
    "train --data no/data --rsqrt-timescale 0.5": "--rsqrt-timescale: it has an effect only with --schedule rsqrt",
    "train --data no/data --average-start capped": "--average-start: it has an effect only with --average",
    "train --data no/data --mixup-per batch": "--mixup-per: it has an effect only with --mixup",
    "train --data no/data --cutmix 1 --mixup-per batch": "--mixup-per: it has an effect only with --mixup",
    "train --lora-on query value": "--lora-on: it has an effect only with --lora-rank",
    "train --init no/model --train-blocks 0 --dropout 0.1": "--dropout: 0.1 is for blocks that are trained",
    "train --init no/model --head-hidden 8": "--head-hidden: 8 cannot be given with --init",
    "train --data no/data --clip 0 --clip-of weight": "--clip-of: it has an effect only with --clip above 0",
    "train --data no/data --weight-decay 0 --weight-decay-rule coupled": "--weight-decay-rule: it has an effect only",
    "train --data no/data --weight-decay 0 --weight-decay-factors .*=1": "--weight-decay-factors: it has an",
    "train --data no/data --warmup 0 --warmup-from-zero": "--warmup-from-zero: it has an effect only with --warmup",
    "train --data no/data --spike-window 9": "--spike-window: it has an effect only with --spike-score",
    "train --data no/data --rollback-skips 9 --on-non-finite skip": "--rollback-skips: it has an effect only with",
    "train --data no/data --max-faults 9": "--max-faults: it has an effect only with --on-non-finite skip",
    "train --data no/data --resize squash --pad-value 9": "--pad-value: it has an effect only with --resize pad",
    "train --task dino --grey 0.2": "--grey: it has an effect only on images with --channels 3",
    "train --norm-eps inf": "--norm-eps: inf is not a finite number",
    "train --weight-decay inf": "--weight-decay: inf is not a finite number",
    "train --task vqvae --commitment inf": "--commitment: inf is not a finite number",
    "train --patience 10": "--patience: it has an effect only below the number of --evaluations",
    "train --schedule staircase --stair-at 0.5 0.5": "--stair-at: 0.5 is given twice",
    "train --skip-dropped": "--skip-dropped: it has an effect only with --stochastic-depth above 0",
    "train --positions rotary-2d --position-std 0.1": "--position-std: it has an effect only with learned or relative",
    "train --positions none --positions-cover all": "--positions-cover: it has an effect only with learned --positions",
    "train --optimizer lamb --weight-decay-rule independent": "--weight-decay-rule: 'independent' does not fit",
    "train --data no/data --randaugment-rule big-vision": "it has an effect only with --randaugment-layers",
    "train --data no/data --crop-rule tensorflow": "--crop-rule: it has an effect only with --crop-area",
    "train --data no/data --validation train[9:] --validation-share 0.2": "it has an effect unless --validation is",
    "train --data no/data --steps 5 --epochs 1": "--steps and --epochs exclude each other; give only one of them",
    "train --data no/data --overwrite": "--overwrite: it has an effect only with --run, which names the folder",
    "train --data no/data --preset light2 --mixup-per batch --average 0.9 --average-start initial --probe knn "
    "--probe-every 5": "no/data' does not exist",  # options that other options give an effect are accepted
    "noisy-student dmo": "vitrail: recipe 'dmo' does not exist; nearest: demo",
    "noisy-student --overwrite": "vitrail: --overwrite: finished rounds are never replaced; leave it out, or choose",
    "noisy-student --rounds 0": "vitrail: --rounds: 0 is less than 1",
    "noisy-student --data bundled": "vitrail: --unlabelled: data 'bundled' is labelled and used whole, so there are no",
    "noisy-student --loss sigmoid --data colours[:10%]": "vitrail: --loss: 'sigmoid' makes a teacher of several",
    "noisy-student --task mae": "vitrail: --task: 'mae' has no pseudo labels; Noisy Student needs",
    "noisy-student --teacher nowhere": "vitrail: --teacher: 'nowhere' cannot be loaded",
    "noisy-student --steps 5 --epochs 2": "vitrail: --steps and --epochs exclude each other",
    "study positon": "study 'positon' does not exist; nearest: positions",
    "study head --arms class-tokn": "--arms: 'class-tokn' does not exist; nearest: class-token",
    "study head --seeds 0 0": "--seeds: 0 is given twice; give each value once",
    "study head --seeds 1000": "--seeds: 1000 is not in [0, 1000); the trials have the seed 1000",
    "study head --jobs 0": "--jobs: 0 is less than 1",
    "study head --jobs 100000 --device cpu": "jobs fit; give a smaller number, or free memory",
    "study head --data bundled[:9]": "selects an amount, but the study selects its subsets",
    "runs nowhere": "'nowhere' is not a folder; give the folder that holds your runs",
    "runs empty": "holds no run: no folder in it, down to 3 levels, has a run.json",
    "runs --sort size": "--sort",
    "runs compare one": "RUN: a comparison needs two runs or more",
    "runs compare one two": "'one' is not the folder of a run: it has no run.json",
    "models --batch-size 0": "--batch-size: 0 is less than 1",
    "models --num-classes -1": "--num-classes: -1 is not in [0, 16777216]; 0 means none",
    "models --image-size 28 10000000000000000000": "--image-size: 28 10000000000000000000 is not in [1, 1048576]",
    "models --num-classes 1000000000000": "--num-classes: 1000000000000 is not in [0, 16777216]",
    "models --image-size 0 0": "--image-size: 0 0 is not in [1, 1048576]",
    "models --layers --num-classes 5": "--num-classes: --layers compares single layers, which do not have it",
    "models --measure": "--measure: it measures vitrail models --layers, without MODEL; vitrail bench train",
    "models model --measure": "--measure: it measures vitrail models --layers, without MODEL; vitrail bench train",
    "recipes plain-vit": "plain-vit-s16-90",
    "recipes demo --transfers": "leave RECIPE out",
}  # fmt: skip

FINETUNE = "finetune no/model --data no/data"

TRANSFER = {
    "finetune model": "--data is missing; usage: vitrail finetune MODEL --data SPEC",
    "finetune no-such-model --data colours": "no-such-model",
    "finetune model --data nowhere": "nowhere",
    "finetune model --data colours --variant ViT-B/16": "the model fixes the architecture",
    "finetune model --data colours --init other": "--init: the initial model is MODEL",
    "finetune model --data colours --task mae": "vitrail train --init MODEL --task mae",
    "finetune model --data colours --task clip": "vitrail train --init MODEL --task clip",
    "finetune model --data colours --image-size 33 32": "is not a multiple of patch_size",
    "finetune model --data colours --train-blocks 7": "--train-blocks: 7",
    "finetune model --data colours --lora-rank 4 --train-blocks 1": "exclude each other",
    "finetune model --data colours --optimizer sgd": "--optimizer: 'sgd' also needs a --learning-rate",
    "finetune model --data colours --lora-rank 1000000000000": "--lora-rank: 1000000000000 is not in [1, 65536]",
    "finetune model --data colours --lora-on up": "--lora-on: 'up' needs --lora-rank",
    "finetune model --data colours --protocol paper --patience 3": "--patience: 3 cannot be used when learning",
    "finetune model --data colours --protocol paper --validation-share 0": "leaves no labelled image for",
    "finetune model --suite vtab-1k": "--data is missing; usage: vitrail finetune MODEL --data SPEC",
    "finetune model --suite vtab-1k --data nowhere": "--data: 'nowhere' is not a folder; with --suite, choose a",
    "finetune model --suite vtab --data .": "suite 'vtab' does not exist (nearest: vtab-1k",
    "finetune model --suite one.toml --data .": "suite one: no task could be measured: gone: nowhere",
    "finetune model --suite one.toml --data . --mix 0.3:bundled --per-class 5":
        "--suite one.toml decides which images each task uses for training and for testing; leave out --mix",
    "finetune model --suite one.toml --data . --init other": "--init: the initial model is MODEL",
    "finetune model --suite one.toml --data . --resume runs/one": "a run that --resume continues keeps its",
    "finetune model --strict --data .": "--strict: only the tasks of a --suite can be skipped; name a suite",
    f"{FINETUNE} --learning-rates -1": "--learning-rates: -1.0 must be one or more different numbers above 0",
    f"{FINETUNE} --learning-rates 0.1 0.1": "--learning-rates: 0.1 0.1 must be one or more different numbers above 0",
    f"{FINETUNE} --learning-rate 1 --learning-rates 1 2": "--learning-rate: 1.0 and --learning-rates 1.0 2.0 exclude",
    f"{FINETUNE} --protocol bit --learning-rates 1 2": "BiT's rule has one learning rate",
    f"{FINETUNE} --table-row vtab": "--table-row: 'vtab' is a row of the paper's Table 4; choose --protocol 'paper'",
    f"{FINETUNE} --batch-size 0": "--batch-size: 0 is less than 1",
    f"{FINETUNE} --device nope": "--device: 'nope' cannot be used here",
    f"{FINETUNE} --run taken": "run folder 'taken' exists",
    f"{FINETUNE} --probe-every 5": "--probe-every: it has an effect only with --probe; change that, or leave",
    f"{FINETUNE} --subset-seed 5": "--subset-seed: it has an effect only with --per-class or an amount such as [:1000]",
    "finetune no/model --suite offline --data . --learning-rates 0": "--learning-rates: 0.0 must be one or more",
    "finetune no/model --suite offline --data . --device nope": "--device: 'nope' cannot be used here",
    "optimize nowhere --data nothing --keep 0": "--keep: 0.0 is not in (0, 1]",
    "optimize nowhere --data nothing --keep nan": "--keep: nan is not in (0, 1]",
    "optimize nowhere --data nothing --images 0": "--images: 0 is less than 1",
    "optimize nowhere --data nothing --batch-size 0": "--batch-size: 0 is less than 1",
    "optimize model --data colours --batch-size 1000000000000": "batches of 1000000000000 images needs about",
    "optimize nowhere --data nothing --budget ten": "--budget: 'ten' is not a time",
    "optimize nowhere --data nothing --overwrite": "--overwrite: nothing is written without --out",
    "optimize nowhere --data nothing --out .": "is the current folder; name a new folder inside it",
}  # fmt: skip

KNN = "evaluate headless --data split --by knn"
NOTHING = "evaluate no/model --data no/data"

EVALUATE = {
    "evaluate model": "--data is missing: name a data set, or a suite of tasks with --suite",
    "evaluate headless --data colours --by knnn": "unknown evaluator 'knnn'; nearest: knn",
    "evaluate headless --data colours --by accuracy": "this model has no head, so it cannot classify; fine-tune it, or",
    "evaluate headless --data split --by fewshot --shots 25": "25 shots need 25 training images per class; these",
    f"{KNN} --split train": "--split train: knn cannot be measured on the images that it learns from",
    f"{KNN} --k 9 99": "--k: 99 exceeds the number of labelled training images, 36; choose fewer neighbours",
    "evaluate headless --data split --by fewshot --seeds 0": "--seeds: 0 is not in [1, 10000]",
    f"{KNN} --cache x --no-cache": "--cache and --no-cache exclude each other",
    f"{KNN} --strict": "--strict: only the tasks of a --suite can be skipped",
    "evaluate headless --data . --suite offline --by knn --k 5": "what is measured and how; leave out --by, --k",
    "evaluate headless --data . --suite vtab1k": "'vtab1k' does not exist (nearest: vtab-1k",
    "evaluate classifier --data colours": "'blue', 'green', 'red'",
    "evaluate model --data colours --split test": "has no test split; choose one that it has: train, validation",
    "evaluate model --data flat": "its images have no labels; put the images of each class into a folder",
    "evaluate model --data flat --by knn": "its images have no labels; put the images of each class into a folder",
    "evaluate model --data list.csv": "list.csv has no column of labels",
    "evaluate model --data unlabelled.csv --by knn --split all": "label",
    "evaluate model --data unlabelled.csv --by accuracy --split all": "label",
    "evaluate model --data colours --real real.json": "the model has 3 outputs, but ImageNet's labels need a model",
    "evaluate numbers --data no/data --real real.json": "--real: only accuracy uses it, but --by is regression; add",
    "evaluate numbers --data grey.csv --by accuracy": "accuracy needs classes, but",
    "evaluate numbers --data grey.csv --by fewshot": "fewshot needs images with one label each, but these have numbers",
    "evaluate numbers --data grey.csv --confusion": "--confusion is for classes of images, but this model",
    "evaluate headless --data grey.csv --by linear --numbers brightnes": "brightnes",
    "evaluate headless --data colours --by zeroshot --split all": "no text tower",
    f"{NOTHING} --batch-size 0": "--batch-size: 0 is less than 1",
    "evaluate no/model --suite offline --batch-size -1": "--batch-size: -1 is less than 1",
    "evaluate no/model --suite offline --data no/data": "--data: 'no/data' is not a folder; with --suite, name",
    f"{NOTHING} --reduce-tokens -1": "--reduce-tokens: -1 is less than 0; 0 keeps all tokens",
    "evaluate pooled --data colours --reduce-tokens 1 --reduce-by prune": "--reduce-by: 'prune' needs a class token",
    f"{NOTHING} --reduce-by prune": "--reduce-by: it has an effect only with --reduce-tokens",
    f"{NOTHING} --bootstrap -1": "--bootstrap: -1 is not in",
    f"{NOTHING} --by knn --k 0": "--k: 0 is less than 1",
    f"{NOTHING} --by knn --temperature 0": "--temperature: 0.0 is not above 0",
    f"{NOTHING} --by ''": "--by is empty",
    f"{NOTHING} --suite ''": "--suite is empty",
    f"{NOTHING} --real ''": "--real is empty",
    f"{NOTHING} --by linear --numbers ''": "--numbers is empty",
    f"{NOTHING} --splits ''": "--splits is empty",
    "train --data colours --splits ''": "--splits is empty",
    "nearest features 1.png --model ''": "--model is empty",
    f"{NOTHING} --by knn --k 1 --temperature 0.1": "--temperature: it has an effect only with several neighbours",
    f"{NOTHING} --by linear --penalties 0.1 0": "--penalties: 0.0 is not above 0",
    f"{NOTHING} --by linear --penalty-share 1": "--penalty-share: 1.0 is not in (0, 1)",
    f"{NOTHING} --by linear --penalties 1 1": "--penalties: 1.0 is given twice",
    f"{NOTHING} --by linear --penalties 0.1 --penalty-share 0.2": "--penalty-share: it has an effect only with several",
    f"{NOTHING} --by fewshot --shots 5 0": "--shots: 0 is less than 1",
    f"{NOTHING} --shots 5": "--shots: only fewshot uses it, but the model's own head is measured; add fewshot to --by",
    f"{NOTHING} --by linear --k 5": "--k: only knn uses it, but --by is linear; add knn to --by",
    f"{NOTHING} --by linear --bootstrap 0": "--bootstrap: only accuracy, regression, detection, masks",
    f"{NOTHING} --features embedding": "--features: only linear, fewshot and knn use it, but the model's own head",
    f"{NOTHING} --by accuracy --numbers age": "--numbers: only linear and knn use it",
    f"{NOTHING} --by regression --class-names x": "--class-names: only accuracy uses it, but --by is regression",
    f"{NOTHING} --class-names nope.txt": "cannot read nope.txt, the list of ImageNet's WordNet ids: No such file",
    f"{NOTHING} --real nope.json": "cannot read nope.json, the ReaL labels: No such file or directory",
    f"{NOTHING} --by knn --confusion": "show metrics of the model's own head; add accuracy to --by",
    "evaluate a --data x --by ''": "--by is empty",
    "evaluate a --data x --suite ''": "--suite is empty",
    "evaluate a a --data x": "MODEL...: a is given twice; give each value once",
    "runs compare a b a": "RUN...: a is given twice; give each value once",
    "runs compare a b --overwrite": "--overwrite: only the file that --page names is replaced",
    "evaluate a b --data x --confusion": "--per-class and --confusion show one model; name only one MODEL",
    "evaluate a b --suite offline": "--suite measures one model; name only one MODEL",
    "evaluate a --data x --validation-share 0": "--validation-share: 0.0 is not in (0, 1)",
    "evaluate a --data x --validation-share 0.2 --split all": "an effect only with --split held-out or validation",
    "evaluate a --suite offline --validation-share 0.2": "leave out --validation-share",
}  # fmt: skip

USE = {
    "predict model": "IMAGE... is missing; usage: vitrail predict MODEL IMAGE...",
    "predict model none.png": "none.png' does not exist",
    "predict model empty": "has no images",
    "predict none 1.png": "none' does not exist",
    "predict colours 1.png": "is not a model: it has no model.json",
    "predict model 1.png --overwrite": "--overwrite: no file or folder is written",
    "predict model 1.png --image-size 700000 700000": "a model for images of 700000 x 700000 pixels needs",
    "predict model 1.png --top many": "--top: 'many' is not a whole number",
    "predict model 1.png --device tpu": "--device: 'tpu' cannot be used here",
    "predict none 1.png --top 0": "--top: 0 is less than 1; choose the number of classes",
    "predict none 1.png --json --csv": "--csv and --json exclude each other; give only one",
    "predict model gone.csv": "line 3: gone.png",
    "predict numbers 1.png --top 1": "--top is for classes, but this model predicts numbers; leave it out",
    "predict boxer voc --masks new": "--masks is for masks",
    "predict boxer voc --top 2": "--top is for classes",
    "predict masker voc --coco new.json": "--coco is for boxes",
    "predict masker voc --threshold 0.2": "--threshold is for boxes",
    "predict boxer voc --coco new.json --threshold 0.2": "no effect on --coco",
    "predict boxer voc --coco annotations.json": "no COCO results",
    "predict boxer voc --out new --yolo new": "folder of its own",
    "predict boxer voc/JPEGImages --out new voc/JPEGImages/001.png": "same name",
    "predict boxer voc --split test": "--split",
    "predict boxer voc --data voc": "exclude each other",
    "predict words 1.png --classes 'a bee' ''": "empty",
    "predict words 1.png --classes 'a bee' 'a bee'": "do not differ",
    "predict words 1.png --templates short": "--templates",
    "predict words 1.png --classes 'a bee' 'a fly' --templates none": "neither a file nor a name",
    "predict words 1.png": "--classes",
    "predict model 1.png --classes 'a bee' 'a fly'": "no text tower",
    "embed headless --data split --out new --split validation": "has no validation split; choose one that it has",
    "embed headless --data split --out new --no-cache --cache x": "--cache and --no-cache exclude each other",
    "embed headless --data empty --out new": "empty has no images",
    "embed headless --data split --out file.txt/out": "file.txt is not a folder; choose another path",
    "embed headless --data split --out file.txt/out --format parquet": "file.txt is not a folder",
    "embed headless --data split --out new --image-size 21 30": "30",
    "embed headless --data split --out new --batch-size 100000000":
        "embedding images of 14 x 21 pixels in batches of 100000000 needs about ",
    "embed no/model --data no/data --out new --batch-size -1": "--batch-size: -1 is less than 1",
    "nearest empty 1.png": "holds no features: neither it nor a folder in it has features.json",
    "nearest empty": "--text",
    "nearest empty 1.png --top 0": "--top: 0 is less than 1; choose the number of neighbours",
    "nearest empty 1.png --csv --json": "--csv and --json exclude each other",
    "nearest empty none.png": "none.png' does not exist",
    "explain model 1.png --label bee": "'bee' is not a class of this model; nearest: ",
    "explain model 1.png --layers 2": "--layers 2: block 2 does not exist; choose from 0 to 1",
    "explain model 1.png --heads -3": "head -3 does not exist; choose from 0 to 1",
    "explain model 1.png --top 0": "0 is less than 1; choose the number of classes to show",
    "explain model 1.png --page-size 0": "--page-size: 0.0 is not in (0, 1000000]",
    "explain model 1.png --page-size 1e308": "--page-size: 1e+308 is not in (0, 1000000]",
    "explain boxer 1.png --box 1 --label blue": "--box: 1 and a label both choose an object",
    "explain model nothing.png": "does not exist",
    "explain resnet 1.png": "architecture 'BiT' has no attention to look into",
    "report no/model --data x --images 3": "--images: 3 is less than 4",
    "report no/model --data x --bootstrap 100000000000000000000": "--bootstrap: 100000000000000000000 is not in",
    "compare no/model no --data x --bootstrap -1": "--bootstrap: -1 is not in",
    "report no/model --data x --probe-images -1": "--probe-images: -1 is less than 0",
    "report no/model --data x --saliency-images -1": "--saliency-images: -1 is less than 0",
    "report no/model": "--data is missing",
    "compare a b --data x --images 3": "--images: 3 is less than 4",
    "compare a b --data x --examples -1": "--examples: -1 is less than 0",
    "compare a b": "--data is missing",
    "compare a --data x": "MODEL: name two different models to compare, not a",
    "compare a ./a --data x": "MODEL: name two different models to compare, not a ./a",
    "compare a a --data x": "MODEL: name two different models to compare, not a a",
    "compare a b c --data x": "MODEL: name two different models to compare, not a b c",
    "report model --data few": "can be held out; choose data with a validation split, or measure all images with --sp",
    "optimize model --data few": "training images can be held out; choose data with a validation split",
    "compare model other/model --data few": "held out of training (too few images)",
    "compare model other/model --data few --split all": "images with a label can be compared; the layers need at",
    "convert model new --to gogle": "--to: 'gogle' is not a layout; nearest: google",
    "convert model new --to google": "the file name must end in .npz",
    "convert model folder.npz --to google --overwrite": "folder.npz is a folder; choose another path for the file to",
    "convert model new.npz --to bit": "a Vision Transformer cannot be written as bit",
    "convert model new --to timm --layout tmm": "--layout: 'tmm' does not exist; nearest: timm",
    "convert none new --to timm": "none' does not exist",
    "convert model new --to timm --heads 4": "--heads: 4 does not agree with",
    "convert model new --to timm --image-size 9 8": "is not a multiple of patch_size=(7, 7)",
    "convert model new": "--to is missing; usage: vitrail convert SRC DST --to LAYOUT",
    "convert model --to timm": "DST is missing",
    "convert model . --to vitrail": ". is the current folder; name a new folder inside it",
    "convert model . --to vitrail --overwrite": ". is the current folder; name a new folder inside it",
    "convert model file.txt/out.npz --to google": "file.txt is not a folder; choose another path",
    "convert model file.txt/out --to timm": "file.txt is not a folder; choose another path",
    "convert model file.txt/out --to vitrail": "file.txt is not a folder; choose another path",
    "convert model file.txt/out.pth --to torchvision": "file.txt is not a folder; choose another path",
    "convert model file.txt/out --to huggingface": "file.txt is not a folder; choose another path",
    "export missing --to ,": "--to: ',' names nothing",
    "export missing --to onxx": "--to: 'onxx' is not a format; nearest: onnx",
    "export missing --to pt2 --out a.onnx": "must end in '.pt2'",
    "export headless --to triton": "triton-models/headless holds files that Vitrail did not write (mine)",
    "export missing --to pt2 --images 0": "--images: 0 is less than 1; at least one",
    "export missing --to pt2 --out file.txt/a.pt2": "is not a folder",
    "export model --to onnx --precision int8": "--data: precision 'int8' needs data with the model's classes",
    "export model --to onnx --precision dynamic": "--precision: 'dynamic' is refused: dynamic quantisation takes its",
    "export model --to onnx --precision float32,int8 --out a.onnx": "--out: 'a.onnx' is the name of one file, but 2",
    "export missing --to pt2 --opset 23": "--opset: it has an effect only with --to onnx",
    "export missing --to onnx --max-drop 1": "--max-drop: it has an effect only with --precision int8",
    "export missing --to onnx --calibration-images 9": "--calibration-images: it has an effect only with",
    "export missing --to onnx --max-drop 101 --precision int8": "--max-drop: 101.0 is not in [0, 100]",
    "export missing --to onnx --tolerance inf": "--tolerance: inf is not a finite number",
    "export missing --to onnx --tolerance nan": "--tolerance: nan is not a finite number",
    "export missing --to onnx --tolerance -1": "--tolerance: -1.0 is less than 0",
    "export model --to onnx --calibration-images 0": "--calibration-images: 0 is less than 1",
    "serve": "MODEL... is missing; usage: vitrail serve MODEL...",
    "serve model model --port 0": "MODEL: two models are called 'model'; give another name to one",
    "serve =model --port 0": "lacks a name or a path; give NAME=MODEL",
    "serve 'a =model' --port 0": "MODEL: 'a ' begins or ends with a space",
    f"serve model --host {'é' * 70} --port 0": "cannot be used",
    "serve model --host 192.0.2.1 --port 0": "choose an address of this machine",
    "serve model --token ''": "--token",
    "serve model --token ' abc '": "--token",
    "serve model --max-body 0": "--max-body: 0 is less than 1",
    "serve model --workers 0": "--workers: 0 is not in [1, 1024]",
    "serve model --workers 2000": "--workers: 2000 is not in [1, 1024]",
    "serve model --max-queue 8 --port 0": "--max-images: 64 is more than --max-queue 8",
    "serve model --port PORT": "on host='127.0.0.1' cannot be used: Address already in use",
    "serve nowhere/at-all/here --port 0": "nowhere/at-all/here",
    "serve google/vit --watch --port 0": "--watch: True needs files, but 'google/vit' is a name on the hub",
}  # fmt: skip

DATA = {
    "data check no-such-data": "no-such-data",
    "data check colours --sample 0": "--sample: 0 is less than 1",
    "data check colours --threads 0": "--threads: 0 is less than 1",
    "data check colours --max-skipped 2": "--max-skipped: 2.0 is not in",
    "data check colours --validation-share 1": "--validation-share: 1.0 is not in [0, 1)",
    "data check colours --validation-share 0.01": "0.01 of 36 training images leaves the validation split",
    "data check colours --validation train[3": "'train[3' is not auto, train or a slice of the training images",
    "data check colours --validation train[99:]": "'train[99:]' has the bound 99, which is beyond the 36 images: data ",
    "data check no/data --validation train[9:] --validation-share 0.2": "an effect unless --validation is a slice",
    "data check colours --page no/such/a.html": "there is no folder no/such",
    "data check colours --page empty": "empty is a folder; choose another path for the file to write",
    "data check colours --page file.txt": "file.txt exists already and is not an earlier page of data check; choose",
    "data check flat --page None": "has images but no class folders",
    "data check grey.csv --page None --label-separator ''": "--label-separator is empty",
    "data check grey.csv --page None --ignore-label ''": "--ignore-label is empty",
    "data check colours --page None --splits train": "--splits",
    "data pack colours colours": "is not empty and has no shards to continue; choose another folder",
    "data pack colours new --shard-size much": "--shard-size: 'much' is not a size in bytes",
    f"data pack colours new --shard-size {'9' * 400}": "is not a size in bytes",
    "data pack nothing new": "does not exist",
    "data pack colours file.txt/shards": "file.txt is not a folder; choose another path",
    "data label colours --out new --teacher model --confidence 2": "vitrail: --confidence: 2.0 is not in [0, 1]",
    "data label colours --out new --teacher model --seed -1": "vitrail: --seed: -1 is less than 0",
    "data label colours --out new --teacher model --images-per-class 3 --no-balance":
        "vitrail: --images-per-class: 3 has no effect without balance",
    "data label colours --out new --teacher model --images-per-class 100000000000000000000": "--images-per-class",
    "data label colours --out new --teacher model --no-balance --seed 3":
        "--seed: it has an effect only with --balance",
    "data label colours --out new --teacher nowhere": "vitrail: --teacher: 'nowhere' cannot be loaded",
    "data label colours --out new --teacher model --confidence 1":
        "vitrail: --confidence: 1.0 is reached by none of 36 images",
    "trian": "unknown command 'trian'; nearest: train",
    "data chek": "unknown command 'data chek'; nearest: data check",
}  # fmt: skip

REFUSED = KINDS | BENCH | TRAIN | TRANSFER | EVALUATE | USE | DATA


def listing(folder: Path) -> dict[str, list[str]]:
    """Return the names of the files in a folder, and in the folders in it. All folders below take too long."""
    return {path.name: sorted(os.listdir(path)) if path.is_dir() else [] for path in folder.iterdir()}  # noqa: PTH208


@pytest.mark.parametrize("call", REFUSED)
def test_a_wrong_call_is_refused_before_anything_is_written(
    call: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("VITRAIL_DATA", str(place.parent / "cache"))
    before = listing(place)
    words = [(place / "port").read_text() if word == "PORT" else word for word in shlex.split(call)]
    assert main(words) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert REFUSED[call] in errors and "Traceback" not in errors
    assert listing(place) == before


def test_a_missing_package_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve", str(place / "model")]) == 2
    assert "starlette is not installed; install it with: pip install 'vitrail[serve]'" in capsys.readouterr().err
