"""Time limits in seconds that no recipe changes: each bounds what takes a moment unless something is broken.

What may take longer with another model, data set or machine is a key of the recipe instead; docs/architecture.md lists
both.
"""

from __future__ import annotations

VERIFIER_ANSWER_S = 30.0
"""The verifier host starts or ends one of its processes, takes in samples, or ends itself."""
RESULT_S = 60.0
"""A worker's result that has arrived on this host is read, or a worker tells its process id."""
COLLECTOR_END_S = 10.0
"""The thread that samples ahead ends, when the loop has."""
COLLECTOR_POLL_S = 0.2
"""The thread that samples ahead looks up from waiting for samples, to send out prompts."""
RAY_PROBE_S = 2.0
"""A Ray that `ray start` left on this host takes a connection."""
DOCTOR_CONNECT_S = 5.0
"""The doctor connects to the cluster of RAY_ADDRESS."""
DOCTOR_ANSWER_S = 60.0
"""A node tells the doctor its versions."""
HOST_COMMAND_S = 10.0
"""nvidia-smi or git says what the manifest keeps; without an answer it keeps nothing."""
SIGNAL_REPEAT_S = 10.0
"""A signal this soon after one that raised comes from an impatient hand, or goes to a group twice, and is dropped.

Later ones raise again, for the exception may have been lost in code that catches everything.
"""
WATCH_POLL_S = 1.0
"""`watch` looks whether the files of its run have changed."""
