use super::*;
use clap::Parser;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: MatrixOptions,
}

// covers: matrix/labs
#[test]
fn engines_are_here_or_in_labs() {
    for (line, here, labs) in [
        ("x", &["soft"][..], &[][..]),
        ("x --labs", &["soft"], &["kvm-amd", "kvm-intel"]),
        ("x --engine kvm-intel", &[], &["kvm-intel"]),
        ("x --engine soft,kvm --engine kvm-amd", &["soft", "kvm"], &["kvm-amd"]),
    ] {
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(engines(&line.options), (here.to_vec(), labs.to_vec()));
    }
    assert!(Line::try_parse_from(["x", "--engine", "kvm-arm"]).is_err());
    assert!(Line::try_parse_from(["x", "--labs", "--engine", "soft"]).is_err());
}
