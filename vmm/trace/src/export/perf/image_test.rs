use super::*;
use crate::symbols::ProgramFile;

// covers: trace/export-perf-names
#[test]
fn a_file_of_code_is_an_elf_file_with_its_names() {
    let path = std::env::temp_dir().join(format!("minivmm-image-{}", std::process::id()));
    let mut image = Image::create(path.clone()).unwrap();
    let at = image.append(&[[0x90; PAGE], [0xcc; PAGE]]).unwrap();
    image.name(at + 16, 32, "first");
    let again = image.append(&[[0xc3; PAGE]]).unwrap();
    image.name(again, PAGE as u64, "again");
    image.finish().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let read = std::process::Command::new("readelf")
        .args(["-lSs", "-W"])
        .arg(&path)
        .output()
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let (said, errors) = (
        String::from_utf8(read.stdout).unwrap(),
        String::from_utf8(read.stderr).unwrap(),
    );
    assert!(read.status.success() && errors.is_empty(), "{errors}");
    assert!(said.contains(" first\n") && said.contains(".text"), "{said}");
    assert_eq!((at, again), (0x1000, 0x3000));
    assert_eq!((bytes[0x1000], bytes[0x2000], bytes[0x3000]), (0x90, 0xcc, 0xc3));
    let program = ProgramFile::parse(&bytes, "x").unwrap();
    assert_eq!(program.symbols.lookup(0x1017).unwrap().to_string(), "first+0x7 [x]");
    assert_eq!(program.symbols.lookup(0x3fff).unwrap().symbol.name, "again");
    assert_eq!(program.address(0x1017).unwrap().0, 0x1017);
}
