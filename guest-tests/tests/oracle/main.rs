//! One oracle: what every unit tells of a run is the engine's log of it. The units are an observer's.

mod boot;
mod code;
mod edges;
mod judge;
mod programs;
