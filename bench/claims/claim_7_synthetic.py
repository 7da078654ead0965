"""Claim 7: what losses do on data made for it."""

from __future__ import annotations

from bench.claims.claim import Claim, Comparison, Row, Study

SETTINGS = {"train.epochs": 20, "batch.size": 128, "train.learning_rate": 0.02, "encoder.positions": False}
MEMORY = ("synthetic-memory",)

CLAIM = Claim(
    number=7,
    title="Memory, and many positives",
    text="A dual encoder can memorise labels whose texts mean nothing, as a classifier can, if the loss is right; softmax "
    "over several positives asks for equal probabilities and so holds the easy ones down, the more so the more there are.",
    source='DEXML, poster ("What\'s wrong with InfoNCE?") and its reviews (synthetic experiments, figures 2 and 3); no '
    "figures in our sources",
    setting="Made-up data (`bench/claims/synthetic.py`): 1,500 queries, 400 labels. *memory*: random words, random label "
    "texts, three random labels per query, scored on the training queries. *positives M*: M labels per query; "
    "the words of two of them always stand in the text, those of the others in 3 of 10 cases. All positives count "
    "in every step. Static encoder, 20 epochs in batches of 128, rate 0.02.",
    columns=("P@1", "P@3", "P@5", "R@10", "CPU s"),
    rows=(
        Row(name="decoupled", recipe="dexml", settings={"loss.positives": 0}),
        Row(name="softmax", recipe="dexml", settings={"loss.name": "softmax", "loss.positives": 0}),
        Row(name="BCE, scale and bias", recipe="bce-scaled"),
        Row(name="classifier (Renee)", recipe="renee", head="classifier", only=MEMORY),
    ),
    studies=(
        Study(sample="synthetic-memory", settings=SETTINGS),
        Study(sample="synthetic-positives-3", settings=SETTINGS),
        Study(sample="synthetic-positives-10", settings=SETTINGS),
        Study(sample="synthetic-positives-30", settings=SETTINGS),
    ),
    comparisons=(
        Comparison(
            text="the dual encoder memorises as well as the classifier (P@3 within 2)",
            better="decoupled",
            worse="classifier (Renee)",
            metric="P@3",
            at_least=-2.0,
        ),
        Comparison(text="decoupled above softmax at P@1", better="decoupled", worse="softmax", metric="P@1"),
        Comparison(text="decoupled above softmax at P@3", better="decoupled", worse="softmax", metric="P@3"),
    ),
    seen=65,
    why=(
        "With texts that mean nothing the dual encoder learns every label of every training query by heart, with "
        "softmax as well as decoupled softmax, and faster than the classifier: memory was never what it lacked. "
        "(A static encoder has a vector per word, and so many parameters; this says nothing of a small "
        "transformer.) With three, ten and thirty positives of unequal difficulty softmax loses 3, 13 and 20 "
        "points of P@1 to decoupled softmax, though the two easy labels are named in every text: the more "
        "positives, the more it loses. BCE with scale and bias learns slowly by heart, is best on ten unequal "
        "positives, and falls behind decoupled softmax on thirty."
    ),
)
