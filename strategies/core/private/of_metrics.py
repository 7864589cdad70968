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
groups = attrgetter("_groups")
groups_checked = attrgetter("_groups_checked")
state_is_copy = attrgetter("_state_is_copy")
to_renamed_dict = attrgetter("_to_renamed_dict")
