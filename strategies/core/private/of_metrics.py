"""Private names of torchmetrics; Lightning's own metrics of logged values have them, too."""

from operator import attrgetter

COMPUTED, FORWARD_CACHE, UPDATE_COUNT, DEFAULTS, SYNC_DIST = (
    "_computed", "_forward_cache", "_update_count", "_defaults", "_sync_dist",
)  # fmt: skip
"""Names of attributes, for code that writes to a metric's dictionary."""

# Metric: its states by name, and how they are reduced
defaults = attrgetter(DEFAULTS)
reductions = attrgetter("_reductions")
reduce_states = attrgetter("_reduce_states")
sync_dist = attrgetter(SYNC_DIST)

# Metric: the value of the last `forward`, and the number of updates
forward_cache = attrgetter(FORWARD_CACHE)
update_count = attrgetter(UPDATE_COUNT)

computed = attrgetter(COMPUTED)

# Running
num_vals_seen = attrgetter("_num_vals_seen")

# MetricCollection
GROUPS, GROUPS_CHECKED, STATE_IS_COPY = "_groups", "_groups_checked", "_state_is_copy"
groups = attrgetter(GROUPS)
groups_checked = attrgetter(GROUPS_CHECKED)
state_is_copy = attrgetter(STATE_IS_COPY)
to_renamed_dict = attrgetter("_to_renamed_dict")
