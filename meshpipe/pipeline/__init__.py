"""The actors that run a model over stages: stage, session, credits, sink, coordinator."""
