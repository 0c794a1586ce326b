"""The stores that rows go to, one file a sink, behind the interface of :mod:`.base`."""
