//! The debug-store area. SDM Vol. 3B 18.4.9 "BTS and DS Save Area".

pub mod area;
pub mod bts;
pub mod pebs;
pub mod pebs_trace;
