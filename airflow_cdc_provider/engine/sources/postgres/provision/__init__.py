"""The slot and what leads to it: readiness of the server, provisioning, the gate of each run, removal."""
