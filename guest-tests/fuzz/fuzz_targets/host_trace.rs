#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| guest_tests::fuzz::host_trace(bytes));
