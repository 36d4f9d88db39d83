"""Features of a program that cannot be combined, and why.

`only("loss", {"none"}, why, custom={"none"})` is a rule: a program with this
loss must have one of these values of `custom`. A set of layers, callbacks ...
limits each of them. `PLAIN` has the plainest values of all features, and `but`
all values except some.
"""

import importlib.metadata

from .groups import PLACES
from .models import BODIES, LAST, LOSSES

OWN_METRICS = {
    *("guide", "result", "vector", "weighted mean", "means", "unlisted"),
}
ADDED = {f"add_loss {kind}" for kind in ("mean", "rows", "views", "sum")}
OWN_LOSS = {"compute_loss", "per row", *OWN_METRICS}
OWN_STEP = {"train_step", "SAM", "own average", *OWN_METRICS}
FILES = {"TFRecords", "text"}
GENERATORS = {"generator", "from_generator"}
BOTH = {"two inputs", "two outputs"}
OURS = {"Lamb", "LANS", "AdamOffload", "DGC", "DGC dense", "DGC to the end"}
ADAPTED = {"Lamb", "LANS", "KerasLamb", "Adafactor"}
PARTS = {"gan", "parts", "no call", "scalar"}
HALVES = {"bfloat16", "float16"}
# Layers that are classes of a script.
CLASSES = (
    *("SelfAtt", "PositionEmb", "Residual", "TwoEmb", "TiedEmb", "Unused"),
)
STATEFUL = {"Centre", "CommonCentre", "Codebook"}
OWN_OPTIMIZERS = {
    *("OfCopies", "OfReversed", "OfIndices", "OfAttribute"),
    *("Counting", "CountingEach", "MyLamb", "MyLANS"),
}
OF_ITS_OWN = {
    f"{name} of its own"
    for name in ("predict_on_batch", "test_on_batch", "train_on_batch")
}
SHUFFLED = {
    *("shuffle", "before", "in map", "in flat_map", "random filter"),
    *("two", "np.random", "in interleave", "in files"),
}
# Wrappers that take local steps between synchronizations.
LOCAL = {"SparseLoCo of 4", "SparseLoCo ahead", "SparseLoCo overlapping"}
# Wrappers whose sent and kept amounts can be compared.
COMPARED = ("SparseLoCo", "SparseLoCo ahead", "SparseLoCo overlapping")
# Losses that are sums over rows.
SUMS = {"sum", "none"}
# These also have the rate 0, since their batches have other rows.
RATELESS = {"policy": "FILE", "shared as": "its own"}
# Actions that call `fit` again.
REFITTED = {
    *("fit", "freeze", "thaw", "freeze, compile", "set rate", "save, load"),
}
SAVED_RATES = {"LearningRateScheduler", "ReduceLROnPlateau"}
# The plainest values of all features; lists are empty.
PLAIN = {
    *("none", "layers", "sequential", "vector", "regression", "float32"),
    *("inside", "not", "constant", "ordinary", 0, 1),
    *("Keras", "in order", "by hand", "apply", "function", "dataset"),
    *("at once", "nothing", "nobody", "keras.Variable"),
    *("alike", "any", "def", "Keras's", "metrics", "AUTO", "by one", False),
    *("mse", "SGD", "arrays"),
}
# Actions that call `fit` on data of another kind.
OF_OTHER_KINDS = {
    *("fit arrays", "fit a dataset", "fit a dataset without length"),
    *("fit a PyDataset", "fit a generator"),
}
# Data of unknown length.
UNKNOWN = {
    *("filter", "flat_map", "unbatch", "interleave"),
    *("fit a dataset without length", "fit a generator"),
}
# Features of custom loops only, and of tests of conservation only.
OF_LOOPS = ("args", "mean", "apply", "loop", "shared as", "built")
OF_COMPRESSION = ("wire", "exchange")


class But(frozenset):
    """All values except these."""

    def __contains__(self, value):
        return not super().__contains__(value)


def but(*values):
    return But(values)


def version_of(*packages):
    """Return the version of the first installed package, without an import."""
    for name in packages:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(map(int, version.split(".")[:2]))
    return (0, 0)


class Rule:
    """A combination of features that is not possible.

    Args:
        why: The reason, as a phrase.
        is_broken: Returns whether a program breaks the rule.
        name: The feature that is changed first.
        allowed: The values that other features may have.
    """

    def __init__(self, why, is_broken, name=None, allowed=None):
        self.why, self.is_broken = why, is_broken
        self.name, self.allowed = name, allowed or {}


def only(name, values, why, plain="", **allowed):
    """Return a rule: these values allow only some values of others.

    `plain` lists features that must be plain, separated by commas. A keyword
    `looked_at` names the feature "looked at".
    """
    allowed = {
        **(dict.fromkeys(plain.split(", "), PLAIN) if plain else {}),
        **{key.replace("_at", " at"): limit for key, limit in allowed.items()},
    }

    def is_broken(program):
        return any(value in values for value in each(program[name])) and any(
            not is_allowed(program[other], limit)
            for other, limit in allowed.items()
        )

    return Rule(why, is_broken, name, allowed)


def each(value):
    return value if isinstance(value, list) else [value]


def is_allowed(value, limit):
    return all(one in limit for one in each(value))


def never(is_broken, why):
    """Return a rule that no table can express."""
    return Rule(why, is_broken)


def has_layer(program, *parts):
    """Return whether a layer's name or text contains one of `parts`."""
    bodies = BODIES[program["input"]]
    return any(
        part in name or part in bodies[name]
        for name in program["layers"]
        for part in parts
    )


def fits(program):
    """Return whether each layer accepts the rank of the previous one."""
    names = program["layers"]
    return LAST.isdisjoint(names[:-1]) and not any(
        "mbedding" in name or name == "ConvLSTM1D" for name in names[1:]
    )


def replicas_of(program):
    workers, devices = PLACES[program["where"]]
    return 1 if program["where"] == "elsewhere" else workers * devices


def may_lack_rows(program):
    """Return whether some replica may have no rows of a batch."""
    others, batch = replicas_of(program) - 1, program["batch"]
    rest = (batch * program["batches"] + program["rest"]) % batch
    return others > 0 and (
        program["shared as"] == "its own"
        or any(n <= others * -(-n // (others + 1)) for n in (batch, rest) if n)
    )


def is_mean(program):
    """Return whether the loss of an epoch is a mean over its rows."""
    return (
        "reduction" not in LOSSES[program["task"]][program["loss"]]
        and program["loss"] != "by hand: scalar"
        and program["custom"] == "none"
        and program["weights"] == "none"
        and not has_layer(program, "Activity", "mask", "Mask")
    )


TENSORFLOW = version_of("tensorflow")

RULES = [
    # Scripts.
    only(
        *("script", {"conservation"}, "it has nothing else"),
        plain=(
            "family, input, layers, style, custom, task, precision, rest, "
            "source, pipeline, shuffle, looked at, weights, validation, "
            "steps, scale, loss, metrics, optimizer, rate, clip, average, "
            "accumulate, exclude, another model, frozen, made, "
            "steps_per_execution, callbacks, interrupt, actions, emptied, "
            "policy, vocabulary, fetched, branches"
        ),
        eagerly={False},
        distributed={False},
        wrapper={"none", *COMPARED},
        where=but("mirrored", "elsewhere"),
    ),
    only(
        *("script", {"loop"}, "a loop has no `fit`"),
        source={"tf.data", *FILES},
        plain=(
            "steps, validation, callbacks, interrupt, metrics, custom, "
            "family, steps_per_execution, shuffle, emptied, policy, "
            "branches, looked at"
        ),
        made={"inside", "optimizer outside"},
        eagerly={False},
        distributed={False},
        weights=but("class"),
        actions={"state"},
        loss={
            *("mse", "binary_crossentropy", "sparse_categorical_crossentropy"),
            "categorical_crossentropy",
        },
        style=but("lazy", "subclassed", "two outputs"),
        layers=but(*STATEFUL),
        precision={"float32", "float64", "bfloat16"},
    ),
    *(
        only(name, but(*PLAIN), "of loops", script={"loop"})
        for name in OF_LOOPS
    ),
    *(
        never(
            lambda p, name=name: (
                p[name] not in PLAIN | {"float32", "any", "alike"}
                and p["script"] != "conservation"
                and (
                    name == "scales"
                    or not p["optimizer"].startswith("DGC")
                    or p["wrapper"] != "none"
                )
            ),
            "of what is sent",
        )
        for name in ("scales", *OF_COMPRESSION)
    ),
    only(
        *("shared as", {"its own"}, "each worker has batches of its own"),
        optimizer={"SGD"},
        wrapper={"none"},
        rate={"constant"},
        mean=but("compute_average_loss"),
        apply=but("two losses", "in two calls"),
        layers=but(
            *("BatchNormalization", "SynchronizedBatchNorm", "Constrained"),
            "SpectralNormalization",
        ),
        average={"none"},
        pipeline=but("drop_remainder"),
    ),
    never(
        lambda p: (
            p["script"] == "loop"
            and "drop_remainder" in p["pipeline"]
            and (p["loop"] == "eager" or p["batch"] % 12)
        ),
        "only whole shares have a static shape",
    ),
    only("loop", {"eager"}, "devices take turns", where=but("2x2")),
    never(
        lambda p: p["emptied"] != "none" and has_layer(p, "Conv"),
        "their gradients are random without rows, in one process too",
    ),
    never(
        lambda p: (
            p["script"] == "loop"
            and may_lack_rows(p)
            and has_layer(
                *(p, "Conv"),
                *(("LSTM", "GlobalMax") if p["loop"] == "eager" else ()),
            )
        ),
        "these layers do not accept a batch without rows",
    ),
    only(
        *("apply", {"in two calls", "two losses"}, "two steps"),
        accumulate={1},
        optimizer=but(*ADAPTED),
    ),
    only(
        *("precision", {"float64", "bfloat16"}, "what is mixed, breaks"),
        weights={"none", "class"},
    ),
    # Steps.
    only("step", but("def"), "of classes", custom=OWN_STEP),
    only("returned", but("metrics"), "of it", custom={"train_step", "SAM"}),
    only("test step", but("Keras's"), "of it", custom={"train_step", "SAM"}),
    only("drawn", but("nothing"), "of it", custom={"train_step", "SAM"}),
    only(
        *("held by", but("nobody"), "of it"),
        custom={"train_step"},
        shuffle=but(*SHUFFLED),
    ),
    only(
        "held as", but("keras.Variable"), "of it", **{"held by": but("nobody")}
    ),
    only("aggregation", but("none"), "of it", **{"held by": but("nobody")}),
    never(
        lambda p: (
            p["interrupt"] != "none"
            and p["held by"] != "nobody"
            and (p["held by"] != "the model" or p["held as"] == "tf.Variable")
        ),
        "a backup has the model's weights",
    ),
    only(
        *("layers", {"SpectralNormalization"}, "it assigns moved weights"),
        custom=but("SAM"),
    ),
    only(
        *("layers", {"Unused"}, "None is no tensor"),
        custom=but("SAM"),
        apply=but("in two calls", "two losses"),
    ),
    only(
        *("returned", {"by output"}, "labels and outputs of one shape"),
        task=but("classes"),
    ),
    only(
        *("returned", {"rate", "steps"}, "one optimizer has them"),
        optimizer=but("MultiOptimizer"),
    ),
    only(
        *("custom", {"own average"}, "the optimizer leaves the average alone"),
        optimizer={"SGD", "Adam", "AdamW", "Lamb", "LANS", "DGC", "DGC dense"},
        average={"none"},
        precision={"float32", "mixed_bfloat16"},
    ),
    only(
        *("custom", {"SAM"}, "the loss is not scaled"),
        precision={"float32", "mixed_bfloat16"},
        wrapper=but("LossScale"),
    ),
    only(
        *("custom", {*OWN_STEP, *OWN_LOSS, "compute_loss plus"}, "a class"),
        style=but("lazy"),
    ),
    # Data.
    only(
        *("emptied", but("none"), "of batches"),
        source={"tf.data", *FILES},
        batches=but(1),
        pipeline=but("drop_remainder"),
        custom={"none"},
        loss=but("by hand: scalar", "none"),
        layers=but(
            *("BatchNormalization", "SynchronizedBatchNorm", *STATEFUL),
            "ActivityRegularization",
        ),
        metrics=but("R2Score"),
        steps_per_execution={1},
        shuffle={"none"},
        steps={"none"},
        interrupt={"none"},
        policy={"AUTO"},
        style=but("two outputs"),
        family={"layers"},
        accumulate={1},
    ),
    only(
        *("policy", {"FILE"}, "each worker has batches of its own"),
        source={"TFRecords"},
        where={"2"},
        optimizer={"SGD"},
        wrapper={"none"},
        rate={"constant"},
        average={"none"},
        accumulate={1},
        steps={"none"},
        steps_per_execution={1},
        validation={"none"},
        interrupt={"none"},
        pipeline=PLAIN,
        metrics=PLAIN,
        custom={"none"},
        shuffle={"none"},
        looked_at={"not"},
        family={"layers"},
        callbacks=but(*SAVED_RATES, "EarlyStopping"),
        actions={"count", "evaluate", "fit", *OF_OTHER_KINDS},
    ),
    never(
        lambda p: (
            p["policy"] == "FILE"
            and (
                not is_mean(p)
                or p["loss"] == "ignored class"
                or has_layer(p, "BatchNorm", "Constrained", "Spectral")
                or set(p["layers"]) & STATEFUL
            )
        ),
        "a batch's loss depends on its other rows",
    ),
    only(
        *("vocabulary", {"set"}, "each order must learn the same"),
        input={"tokens"},
        source={"arrays", "PyDataset", *GENERATORS},
        layers=but("masked Embedding", "PositionEmbedding"),
        seeded={True},
        interrupt={"none"},
        where=but("mirrored"),
        optimizer=but(*ADAPTED, "DGC", "DGC to the end"),
        wrapper=but("SparseLoCo", *LOCAL),
    ),
    only("fetched", but("by one"), "a PyDataset's", source={"PyDataset"}),
    only(
        *("distributed", {True}, "of datasets"),
        source={"tf.data", *FILES},
        steps={"none"},
        shuffle={"none"},
        interrupt={"none"},
        where=but("mirrored"),
        steps_per_execution={1},
        looked_at={"not"},
        callbacks=but("BackupAndRestore"),
        emptied=but("filter"),
    ),
    only("branches", {"fit"}, "of `fit`", interrupt={"none"}),
    only(
        *("branches", {"data"}, "of datasets"),
        source={"tf.data", *FILES},
        looked_at={"not"},
    ),
    only(
        *("scale", {"enormous"}, "only norms overflow"),
        script={"Keras"},
        clip={"clipnorm"},  # Keras's other optimizer makes NaN, too.
        wrapper={"ShardedState"},
        optimizer={"SGD"},
        precision={"float32"},
        style={"sequential"},
        input={"vector"},
        task={"regression"},
        loss={"mse"},
        layers=PLAIN,
        metrics=PLAIN,
        custom={"none"},
        family={"layers"},
        frozen={"none"},
    ),
    # Models.
    only(
        *("made", {"build outside"}, "what is not built yet"),
        # It would draw the initial weights of the chief's.
        **{"another model": but("on the chief")},
        style={"lazy", "subclassed"},
        input=but("tokens"),
        family={"layers"},
        where=but("mirrored"),
    ),
    only(
        *("layers", {*STATEFUL, "EveryDtype"}, "initial values of their own"),
        seeded={True},
        actions=but("save, load"),
        family={"layers"},
        precision=but("float64"),
    ),
    only(
        *("layers", STATEFUL, "it depends on the order"),
        shuffle=but(*SHUFFLED),
        style=but("twins"),
        vocabulary={"none"},
    ),
    only(
        *("precision", HALVES, "no step of one's own is written for it"),
        custom={"none"},
        family={"layers"},
        metrics={"mae", "accuracy"},
        where=but("mirrored"),
        actions=but("predict others", "predict a mean", "state"),
    ),
    # Actions.
    only(
        *("actions", OF_ITS_OWN, "workers that differ"),
        where={"2", "3", "2x2"},
        input=but("tokens"),
        style=but(*BOTH),
        family={"layers"},
        task={"regression"},
        custom={"none"},
        scale={"ordinary"},
    ),
    never(
        lambda p: OF_ITS_OWN & set(p["actions"][:-1]),
        "it ends the script",
    ),
    only(
        *("actions", OF_OTHER_KINDS, "workers agree on a set's order"),
        vocabulary={"none"},
    ),
    never(
        lambda p: any(
            {"freeze", "thaw"} & set(p["actions"][:place])
            for place, action in enumerate(p["actions"])
            if action in OF_OTHER_KINDS
        ),
        "Keras trains what it did, until it traces again",
    ),
    only(
        *("actions", {"orders", "count"}, "of datasets"),
        source={"tf.data", *FILES},
        steps={"none"},
        style=but(*BOTH),
        emptied=but("filter"),
    ),
    only(
        *("actions", {"orders"}, "of shuffles"),
        shuffle=SHUFFLED - {"random filter", "two", "np.random", "in map"},
        batch={8, 12, 6},
        batches={3, 4},
    ),
    only(
        *("actions", {"state"}, "of one optimizer"),
        family=but("gan", "parts"),
        accumulate={1},
        optimizer=but("MultiOptimizer", "DGC dense"),
    ),
    never(
        lambda p: (
            "state" in p["actions"]
            and {"save, load", "freeze, compile"} & set(p["actions"])
        ),
        "the optimizer is another then",
    ),
    only(
        *("actions", {"saved"}, "of one loss"),
        shuffle=but(*SHUFFLED),
        policy={"AUTO"},
        accumulate={1},
    ),
    only(
        *("callbacks", {"Logging"}, "of one optimizer of our strategy"),
        where=but("mirrored"),
        optimizer=but("MultiOptimizer"),
        family=but("gan", "parts"),
    ),
    # Optimizers.
    only(
        *("optimizer", OWN_OPTIMIZERS, "classes of a script"),
        actions=but("save, load", "set rate"),
    ),
    only(
        *("optimizer", {"MyLamb", "MyLANS"}, "in one process, a Keras's"),
        accumulate={1},
        average={"none"},
        actions=but("state"),
        clip={"none"},
    ),
    only(
        "wrapper",
        {"ShardedState"},
        "refused",
        optimizer=but(
            *("DGC", "DGC dense", "DGC to the end", "MultiOptimizer")
        ),
    ),
    never(
        lambda p: (
            {"by hand: variable", "by hand: sum"} & set(p["metrics"])
            and TENSORFLOW < (2, 21)
        ),
        "TensorFlow 2.16 makes no number of a strategy's variable",
    ),
    only(
        *("family", PARTS, "a family has its own model, loss and metrics"),
        plain=(
            "style, custom, input, layers, task, metrics, weights, "
            "validation, precision, frozen"
        ),
        loss={"mse"},
        seeded={True},
        exclude=but("list"),
        actions={"fit", "save_weights"},
    ),
    only(
        *("family", {"gan", "parts"}, "parts have optimizers of their own"),
        made=but("compile outside"),
        callbacks=but(*SAVED_RATES, "SwapEMAWeights"),
        accumulate={1},
        steps_per_execution={1},
        wrapper=but("LossScale"),
        average={"none"},
        exclude={"none"},
    ),
    only(
        *("family", {"parts", "no call"}, "it cannot be built before `fit`"),
        callbacks=but("BackupAndRestore"),
        interrupt={"none"},
    ),
    # Order.
    only(
        *("shuffle", SHUFFLED, "in random order, no rate but 0 is comparable"),
        optimizer={"SGD"},
        wrapper={"none"},
        interrupt={"none"},
        rate={"constant"},
        steps={"none", "fewer"},
        family={"layers"},
        actions=but("set rate", "train_on_batch"),
        callbacks=but(*SAVED_RATES, "EarlyStopping"),
    ),
    only(
        *("shuffle", SHUFFLED, "an average, or an epoch's part, has an order"),
        average={"none"},
        steps={"none"},
        metrics=but("R2Score"),
        precision={"float32"},
    ),
    never(
        lambda p: (
            p["shuffle"] in SHUFFLED
            and p["rest"]
            and (not is_mean(p) or "drop_remainder" in p["pipeline"])
        ),
        "the mean over an epoch weighs batches by their rows",
    ),
    never(
        lambda p: (
            p["shuffle"] in SHUFFLED
            and (
                p["loss"] == "ignored class"
                or has_layer(p, "BatchNorm")
                or has_layer(p, "Constrained")
            )
        ),
        "a batch's loss depends on its other rows, or on the step",
    ),
    only(
        *("shuffle", {"random filter", "two"}, "their rows have numbers"),
        task={"regression"},
        metrics=PLAIN,
        validation={"none"},
        steps={"none"},
        style=but(*BOTH),
        custom={"none"},
        weights={"none"},
        actions=but("save, load"),
    ),
    only(
        *("shuffle", {"random filter"}, "steps are more or fewer, or none"),
        layers=but("SpectralNormalization"),
        looked_at={"not"},
    ),
    only(
        *("shuffle", {"in map"}, "labels of few rows may agree by chance"),
        task={"regression"},
    ),
    only(
        *("shuffle", {"two", "before", "in map", "in flat_map"}, "in memory"),
        source={"tf.data"},
        style=but(*BOTH),
    ),
    only(
        *("shuffle", {"seeded", "random filter"}, "of rows"),
        source={"tf.data", *FILES},
    ),
    only(
        *("shuffle", {"np.random"}, "a PyDataset permutes its rows"),
        source={"PyDataset"},
        looked_at={"not"},
    ),
    only(
        *("looked at", {"by all", "by the chief"}, "arrays are not used up"),
        source=but("arrays", *GENERATORS),
    ),
    only(
        *("callbacks", {"Drawing"}, "nothing else uses what is drawn"),
        shuffle={"np.random"},
    ),
    # Sources.
    only(
        *("source", GENERATORS, "a generator goes on where it was"),
        shuffle={"none"},
        pipeline=PLAIN,
        interrupt={"none"},
        callbacks=but("BackupAndRestore"),
        weights=but("class"),
    ),
    only(
        *("source", {"generator"}, "Keras draws one batch more in an epoch"),
        steps={"none"},
        accumulate={1},
        validation=but("split"),
        actions=but(*REFITTED, "evaluate", "predict", "saved"),
    ),
    only(
        *("source", {"arrays"}, "arrays have no pipeline"),
        pipeline=PLAIN,
        shuffle={"none", "shuffle"},
        steps={"none", "fewer"},
    ),
    only(
        *("source", {"PyDataset"}, "a PyDataset has no pipeline"),
        pipeline=PLAIN,
        shuffle={"none", "shuffle", "np.random"},
        weights=but("class"),
        steps={"none", "fewer"},
    ),
    only(
        *("source", FILES, "a line has one input and one output"),
        style=but(*BOTH),
        precision=but("float64"),
        weights=but("class"),
    ),
    only("source", but("arrays"), "of arrays", validation=but("split")),
    only("validation", {"generator"}, "it is there", source={"generator"}),
    only(
        *("style", BOTH, "written for arrays"),
        source={"arrays", "tf.data"},
        custom={"none"},
        weights={"none"},
    ),
    only("weights", {"class"}, "of classes", task={"classes"}),
    only(
        *("steps", {"repeat"}, "only datasets repeat"),
        source={"tf.data", "TFRecords"},
    ),
    only(
        *("steps", {"fewer"}, "Keras goes on in the data, up to their end"),
        batches=but(1),
        epochs={1},
        actions=but("fit", "freeze", "thaw", "freeze, compile", "set rate"),
    ),
    only(
        *("scale", {"huge", "one row", "a scaled row"}, "what overflows"),
        input={"vector"},
        layers=PLAIN,
        metrics=PLAIN,
    ),
    only(
        *("scale", {"huge", "one row"}, "what overflows"),
        precision={"mixed_float16"},
    ),
    only(
        *("scale", {"a scaled row"}, "what overflows is skipped"),
        precision={"float32"},
        wrapper={"LossScale"},
    ),
    # Model.
    only(
        *("seeded", {False}, "unseeded weights are set in a built model"),
        style=but("lazy", "subclassed"),
        layers=but(
            *("BatchNormalization", "SynchronizedBatchNorm"),
            "SpectralNormalization",
        ),
        frozen={"none"},
    ),
    never(lambda p: not fits(p), "layers must fit each other"),
    only("style", {"twins"}, "of numbers", input=but("tokens")),
    only(
        *("style", {"lazy", "subclassed"}, "it is built by `fit`"),
        exclude=but("list"),
        interrupt={"none"},
        callbacks=but("BackupAndRestore"),
    ),
    only(
        *("style", {"subclassed"}, "a class of its own"),
        frozen={"none"},
        actions=but("freeze", "thaw", "freeze, compile", "save, load"),
    ),
    only(
        *("frozen", {"first"}, "something must be left to train"),
        layers=but(*()),
        custom={"none", *ADDED},
    ),
    never(
        lambda p: (
            not p["layers"]
            and (
                p["frozen"] != "none"
                or {"freeze", "thaw", "freeze, compile"} & set(p["actions"])
            )
        ),
        "something must be left to train",
    ),
    never(
        lambda p: (
            "thaw" in p["actions"]
            and p["frozen"] == "none"
            and "freeze" not in p["actions"][: p["actions"].index("thaw")]
        ),
        "only what is frozen can be thawed",
    ),
    # Losses and steps.
    only(
        *("custom", OWN_LOSS, "the step computes its own loss"),
        task={"regression"},
        loss={"mse"},
        weights={"none"},
    ),
    only(
        *("custom", OWN_METRICS, "the step has its own metrics"),
        metrics=PLAIN,
        precision=but("mixed_float16", "float64"),
        validation={"none"},
        wrapper=but("LossScale"),
        actions=but("train_on_batch", "test_on_batch", "evaluate", "saved"),
    ),
    only(
        *("custom", but("none"), "a class of a script"),
        actions=but("save, load", "freeze", "thaw", "freeze, compile"),
    ),
    only(
        *(
            "loss",
            {name for name in LOSSES["regression"] if "by hand" in name},
            "functions of a script",
        ),
        actions=but("save, load"),
    ),
    only(
        "metrics",
        {
            *("by hand: function", "by hand: Metric", "by hand: variable"),
            *("by hand: sum", "by hand: of losses", "by hand: of metrics"),
        },
        "functions of a script",
        actions=but("save, load"),
    ),
    never(
        lambda p: "save, load" in p["actions"] and has_layer(p, *CLASSES),
        "classes of a script",
    ),
    only(
        *("loss", {"by hand: columns"}, "it may look like one of rows"),
        eagerly={False},
        weights={"none"},
        pipeline=but("drop_remainder"),
        emptied={"none"},
        policy={"AUTO"},
        style=but("two outputs"),
    ),
    only(
        *("loss", {"by hand: moving"}, "its state is that of no layer"),
        where=but("mirrored"),
        interrupt={"none"},
        precision={"float32"},
        style=but("two outputs"),
        shuffle=but(*SHUFFLED),
        emptied={"none"},
        policy={"AUTO"},
        actions=but("saved"),
    ),
    only(
        *("loss", SUMS, "rates of their own are too large for sums"),
        optimizer=but("MultiOptimizer"),
        callbacks=but("LearningRateScheduler"),
        actions=but("set rate"),
    ),
    only(
        *("loss", {"none"}, "Keras adds no number to a loss for each row"),
        custom={"none"},
        layers=but("ActivityRegularization", "Regularized"),
    ),
    # Precision.
    only(
        *("precision", {"float64"}, "something computes in float32"),
        custom=but(*ADDED),
        layers=but("ActivityRegularization", "Regularized"),
        optimizer=but("Lamb", "LANS", "AdamOffload"),
        actions=but("predict others", "predict a mean"),
    ),
    only(
        *("precision", but("float32"), "rounding"),
        interrupt={"none"},
        optimizer=but(*ADAPTED),
        loss=but("log_cosh"),
    ),
    only(
        *("optimizer", ADAPTED, "they magnify rounding where gradients are 0"),
        input={"vector", "image"},
        task={"regression"},
        weights=but("zeros"),
        frozen={"none"},
        average=but("ema overwrites"),
    ),
    never(
        lambda p: (
            p["optimizer"] in ADAPTED
            and has_layer(p, "Norm", "Residual", "Conv2DTranspose")
        ),
        "they magnify rounding where gradients are 0",
    ),
    # Optimizers.
    *(
        only(
            *(name, {value}, "of a linear loss, gradients are the same"),
            plain=(
                "style, custom, input, layers, precision, callbacks, "
                "interrupt, accumulate, average, actions, clip, exclude"
            ),
            loss={"by hand: linear"},
            task={"regression"},
            batches=but(1),
            epochs=but(1),
            family={"layers"},
            frozen={"none"},
            where=but("mirrored"),
        )
        for name, value in (
            ("optimizer", "DGC to the end"),
            ("wrapper", "SparseLoCo to the end"),
            ("wrapper", "SparseLoCo ahead to the end"),
            ("wrapper", "SparseLoCo overlapping to the end"),
        )
    ),
    only(
        *("wrapper", {f"{name} to the end" for name in COMPARED}, "linear"),
        optimizer={"SGD"},
    ),
    only(
        *("optimizer", {"DGC", "DGC dense", "DGC to the end"}, "refused"),
        wrapper={"none", "LossScale"},
        exclude={"none"},
        clip={"none", "clipnorm"},
    ),
    only(
        *("optimizer", {"MultiOptimizer"}, "it has no rate of its own"),
        average={"none"},
        accumulate={1},
        rate={"constant"},
        clip={"none"},
        precision=but("mixed_float16"),
        wrapper=but("LossScale"),
        actions=but("set rate", "save, load"),
        callbacks=but(*SAVED_RATES, "SwapEMAWeights"),
    ),
    only(
        *("optimizer", {"ScheduleFreeAdamW"}, "weights depend on its mode"),
        wrapper={"none", "ShardedState"},
        actions=PLAIN,
        interrupt={"none"},
        average={"none"},
        callbacks=but("SwapEMAWeights"),
        steps_per_execution={1},
    ),
    only("optimizer", {"Ftrl"}, "refused", wrapper={"none", "LossScale"}),
    never(
        lambda p: (
            p["optimizer"] == "AdamOffload"
            and p["wrapper"].startswith("SparseLoCo")
            and p["where"] in ("devices", "2x2", "mirrored")
        ),
        "refused",
    ),
    never(
        lambda p: (
            p["optimizer"] == "AdamOffload"
            and p["wrapper"] == "none"
            and "SwapEMAWeights" in p["callbacks"]
        ),
        "refused",
    ),
    only(
        *("exclude", {"list", "names"}, "there must be a decay"),
        optimizer={"AdamW", "Lamb", "LANS", "AdamOffload"},
        wrapper=but("LossScale"),
    ),
    only(
        *("exclude", {"list"}, "the variables must exist"),
        made={"inside"},
        interrupt={"none"},
        actions=but("freeze, compile"),
    ),
    never(
        lambda p: (
            p["exclude"] != "none"
            and p["optimizer"] == "AdamW"
            and "save, load" in p["actions"]
        ),
        "Keras loses what is excluded",
    ),
    only(
        *("optimizer", {"ScheduleFreeAdamW"}, "eager, it differs in Keras"),
        where=but("1", "elsewhere"),
    ),
    only(
        *("optimizer", {"ScheduleFreeAdamW"}, "strategies build it earlier"),
        layers=but("SpectralNormalization"),
    ),
    only(
        *("optimizer", {"ScheduleFreeAdamW"}, "it reads what has no value yet"),
        family=but("no call"),
    ),
    only(
        *("accumulate", {2}, "files have the first replica's share"),
        actions=but("save, load", "save_weights"),
    ),
    only(
        *("optimizer", {"Nadam"}, "Keras loses its product of momentums"),
        actions=but("save, load"),
        interrupt={"none"},
    ),
    never(
        lambda p: any(
            {"freeze", "thaw"} & set(p["actions"][:place])
            for place, action in enumerate(p["actions"])
            if action == "save, load"
        ),
        "Keras trains what it did until it is compiled again",
    ),
    only(
        *("rate", {"schedule"}, "a schedule cannot be set"),
        actions=but("set rate"),
        callbacks=but(*SAVED_RATES),
    ),
    only(
        *("callbacks", {"SwapEMAWeights"}, "of float32, of one optimizer"),
        average={"ema"},
        precision={"float32", "mixed_float16"},
        wrapper={"none", "ShardedState"},
    ),
    only(
        *("wrapper", {"LossScale"}, "the inner one has the arguments"),
        precision=but("mixed_float16"),
        average={"none"},
        accumulate={1},
    ),
    only("wrapper", LOCAL, "refused", average={"none"}),
    # Actions.
    only(
        *("interrupt", but("none"), "other callbacks see other batches"),
        callbacks=but(
            *("BackupAndRestore", "EarlyStopping", "ReduceLROnPlateau"),
            *("LambdaCallback", "CSVLogger", "ModelCheckpoint"),
            *("Evaluating", "Predicting"),
        ),
        epochs=but(1),
        where=but("mirrored"),
        steps=but("repeat"),
        shuffle=but("seeded"),  # Each epoch has a different order.
        seeded={True},
    ),
    only("interrupt", {"batch"}, "of batches", steps_per_execution={1}),
    only(
        *("eagerly", {True}, "devices of an eager worker take turns"),
        steps_per_execution={1},
        where=but("2x2"),
    ),
    only(
        *("callbacks", {"Copying"}, "a model is copied"),
        style={"sequential", "functional"},
        custom={"none"},
        family={"layers"},
        wrapper=but(*LOCAL),
        where=but("mirrored"),
    ),
    only(
        *("callbacks", {"Evaluating", "Predicting"}, "a loss and predictions"),
        custom=but(*OWN_METRICS),
        family={"layers"},
        where=but("mirrored"),
        source=but(*GENERATORS),
    ),
    only(
        *("actions", {"metric outside", "apply outside"}, "of ours"),
        where=but("mirrored"),
    ),
    only(
        *("actions", {"predict others", "predict a mean"}, "an extended graph"),
        style={"sequential", "functional", "nested"},
        custom={"none"},
    ),
    # TensorFlow's own strategy, which weights and reduces differently.
    only(
        *("where", {"mirrored"}, "TensorFlow's strategy does not do that"),
        plain=(
            "weights, custom, family, accumulate, steps_per_execution, made, "
            "eagerly, average, metrics, looked at, steps"
        ),
        batch={4, 6, 8, 2, 12},
        rest={0},
        loss={"mse", "sparse_categorical_crossentropy"},
        precision=but("mixed_float16"),
        source={"arrays", "tf.data"},
        pipeline=but("drop_remainder"),
        shuffle={"none"},  # Keras draws a batch first, and shuffles continue.
        input=but("tokens"),
        layers=but("masked LSTM", "Centre", "Codebook"),
        validation={"none"},
        actions=but(
            *("predict", "predict one row", "predict others", "predict a mean"),
            *("predict_on_batch", "train_on_batch", "test_on_batch"),
            *("count", "orders", "state", "saved"),
            *("fit a PyDataset", "fit a generator"),
        ),
    ),
    never(
        lambda p: (
            p["where"] == "mirrored"
            and p["wrapper"] == "LossScale"
            and p["script"] == "Keras"
        ),
        "TensorFlow's strategy does not do that",
    ),
    never(
        lambda p: (
            p["where"] == "mirrored"
            and UNKNOWN & {*p["pipeline"], *p["actions"]}
            and p["optimizer"] not in OURS
            and (p["optimizer"] != "SGD" or p["rate"] == "schedule")
            and p["wrapper"] in ("none", "LossScale")
        ),
        "there, Keras's optimizers step once more at the end of the data",
    ),
    never(
        lambda p: (
            p["where"] == "mirrored"
            and p["built"] == "by the first step"
            and p["loop"] != "eager"
            and (p["optimizer"] not in OURS or p["wrapper"] == "LossScale")
        ),
        "there, only our optimizers can be built in a graph",
    ),
]
