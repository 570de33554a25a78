use super::*;

// covers: gdb/lx
#[test]
fn a_kernel_says_its_release() {
    let mut kernel = vec![0; 0x400];
    kernel[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
    kernel[0x300..0x31c].copy_from_slice(b"6.1.0-56-cloud-amd64 (debian");
    assert_eq!(release(&kernel).as_deref(), Some("6.1.0-56-cloud-amd64"));
    assert_eq!(release(&kernel[..0x210]), None);
    assert_eq!(release(b"no"), None);
}
