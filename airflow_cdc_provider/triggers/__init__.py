"""Triggers: what deferred tasks wait for, polled once for all of them."""
