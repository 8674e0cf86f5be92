"""The terminal picture of a fleet: a pure function of a snapshot, and the loop that polls for snapshots."""
