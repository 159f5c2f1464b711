//! The wire format from outside: every record there and back.
#![allow(missing_docs)]

mod roundtrip;
