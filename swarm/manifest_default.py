"""This is where the manifest that `swarm init` writes is: every field, its meaning and its default."""

DEFAULT_MANIFEST = """\
# A run of homeswarm. Every field below has its default; delete what you do not change.
# Look at what it needs with `swarm plan run.toml`, then start it with `swarm host run.toml`.
# Relative paths start at this file's folder.

[run]
# What people call the run: letters, digits, dot, dash, underscore.
name = "my-run"
# How much peers are audited. "friends": all is signed and screened, reducers are recomputed. "public": replicas also
# replay each other's work (see [audits]).
trust = "friends"
# Licence of the weights; volunteers see it before they join.
model_licence = "not stated"
# Licence of the text; they see it too.
data_licence = "not stated"

[model]
# A model to begin with from random weights: "tiny" (0.8 M parameters), "small" (23 M), "medium" (202 M).
preset = "tiny"
# Or a Hugging Face config of your own, as a path or as a table:
# config = "config.json"
# Or a local Hugging Face folder (config.json, *.safetensors) whose weights the run starts from:
# checkpoint = "model-folder"
# Pieces the layers are cut into, balanced by cost; each peer holds one.
stages = 2
# Or the number of layers of each stage, in order:
# stage_layers = [2, 2]
# "fp32", or "bf16": faster on GPUs; weights and gradients stay fp32 either way.
compute_dtype = "fp32"
# Run forward again at backward time: less memory, a third more compute.
recompute = false

[data]
# Text files, jsonl files, and folders of them, in this order. Empty: the source code of Python's standard library.
text = []
# "bytes", or the path of a tokenizer.json or of a folder with one.
tokenizer = "bytes"
# The field of each jsonl line that holds its text.
jsonl_field = "text"
# Reading stops after this many megabytes of text.
max_text_mb = 1024
# Share of the documents that nobody trains on: the run's loss is measured on them.
held_out_share = 0.05
# Tokens in a sample.
sequence_length = 128
# Tokens in a chunk, the unit in which peers share out the data. By default 16 MiB, less where the text is short.
# chunk_tokens = 4194304
# Another number gives another order of the data, and other initial weights.
seed = 0

[batch]
# Samples that travel through the stages together.
microbatch_size = 8
# Target tokens in an optimizer step, over all peers.
target_tokens = 8192

[optimizer]
# "adamw" or "sgd".
name = "adamw"
# The highest rate of the schedule: linear warm-up, then a cosine.
learning_rate = 0.001
# AdamW's decay of the mean gradient.
beta1 = 0.9
# AdamW's decay of the mean squared gradient.
beta2 = 0.95
# Added to AdamW's denominator.
epsilon = 1e-8
# Decoupled weight decay, on tensors of two or more dimensions only.
weight_decay = 0.1
# SGD's momentum.
momentum = 0.9
# Gradients are clipped at this norm; a stage clips at its share of it.
max_norm = 1.0
# A step whose gradient is longer than this many times the median of the last 16 is skipped; 0: none is for that.
skip_norm_factor = 16.0
# What softens stale gradients with averaging.delay = 1: "none", "nadamw" or "extrapolate".
correction = "none"
# How AdamW's moments are kept: "fp32" (8 bytes a parameter) or "int8" (2). Either is the same on every machine.
moments = "fp32"
# Steps until the learning rate is at its highest.
warmup_steps = 20
# The run ends after this many steps.
total_steps = 200
# The schedule ends at this share of learning_rate.
final_learning_rate_share = 0.1

[codecs]
# How activations travel between stages: "fp32", "bf16", "int8" or "int4" (4, 2, about 1.1 and 0.7 bytes a value).
activations = "int8"
# How their gradients travel back: one of the same.
activation_gradients = "int8"
# How gradients travel in averaging rounds: "fp32", "bf16", "int8", "int4" or "topk" (4, 2, 1, 0.5 bytes a value; topk
# sends the largest three in eight in 0.32, results in 0.5). What int4 and topk leave unsaid a peer says in its next
# gradient.
averaging = "int8"

[averaging]
# How a stage's gradients become one: "mean"; "centered_clip", which bounds what one peer can do;
# "trimmed_mean" or "median", coordinate by coordinate (see docs/robustness.md).
rule = "centered_clip"
# 0: each step waits for its round. 1: the next step's microbatches go on meanwhile, on weights one version old.
delay = 0
# With delay = 1, this many steps at the start wait all the same.
sync_steps = 20

[audits]
# With trust = "public" replicas replay a drawn part of each other's work. How much, as shares of the work audited:
# single microbatches,
hop_budget = 0.08
# whole contributions,
contribution_budget = 0.07
# and reduced parts.
reducer_share = 0.05
# Peers keep what a contribution was made from for this many versions.
retained_versions = 4
# With trust = "public" a newcomer trains once so many replays of others' work, of the last 16 versions, came out the
# same; 0: at once.
agreements_to_promote = 10

[checkpoint]
# Steps between the checkpoints that the host archives.
every_steps = 48
# Steps between the snapshots that peers keep for joiners; divides every_steps.
snapshot_every = 8

[limits]
# Peers of each stage the host waits for before the run begins.
founders_per_stage = 1
# A stage takes in no more peers than this: 256 at most; past 64 it reduces in cohorts.
max_peers_per_stage = 64
# Microbatches one peer holds at once; more need more memory.
max_in_flight = 4
# A stage gives no peer to another below this many.
min_replicas = 2
# Seconds between two looks at who should move to a stage that is short of peers; 0: nobody moves. Among friends only.
rebalance_s = 0.0
# After this many failed sends in one step a microbatch is left for a later one.
max_microbatch_attempts = 20

[deadlines]
# Seconds, upper bounds: measured times shorten them. A small request and its answer:
call_s = 10.0
# A microbatch's way from a stage to the loss and back.
hop_s = 60.0
# Each phase of an averaging round.
round_phase_s = 10.0
# A step closes this long after its first microbatch, with whatever it holds.
step_s = 120.0
# How long a full step waits for microbatches already under way.
straggler_s = 2.0
# A peer not heard of for this long has left.
lease_s = 15.0
# How long a leaving peer finishes what it has in flight.
drain_s = 30.0
# Moving a stage's state to a joiner.
state_transfer_s = 600.0
"""


def default_manifest_text() -> str:
    """TOML that reads as the empty manifest does."""
    return DEFAULT_MANIFEST
