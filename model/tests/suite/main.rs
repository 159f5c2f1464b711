//! Tests of the model's public API: each value survives a round trip.

mod control;
