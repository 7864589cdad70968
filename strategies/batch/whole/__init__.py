"""What a step computes of the whole batch, of which it sees a part: means, functions of all rows.

Exports: means, over_batch, meeting.
May import: core.
"""
