"""Many engines behind one address: a router, and replicas on this machine."""
