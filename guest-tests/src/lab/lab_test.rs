use super::*;

// covers: lab/kvm
#[test]
fn a_job_is_what_stands_between_its_marks() {
    let console = "boot\n### begin 0\nhello\nworld\n### end 0 43\n### begin 1\n### end 1 2\n### begin 2\nhangs";
    let ended = parts(console);
    assert_eq!(ended.len(), 2, "the third never ended");
    assert_eq!((ended[0].status, ended[0].said.as_str()), (43, "hello\nworld\n"));
    assert_eq!((ended[1].status, ended[1].said.as_str()), (2, ""));
}

// covers: lab/kvm, lab/intel
#[test]
fn a_job_names_its_files_where_the_lab_has_them() {
    let job = Job::new(["--engine", "kvm"]).file("--kernel", "/some/where/dr.elf");
    let other = Job::program("/a/kvm-points", "/b/hello");
    let folder = Job::new(["matrix"])
        .folder("--guests", "smp", ["/x/smp.elf".into(), "/x/smp.toml".into()])
        .within(7);
    assert_eq!(folder.files.keys().collect::<Vec<_>>(), ["smp/smp.elf", "smp/smp.toml"]);
    for (host, module) in [
        (Host::Amd, "kvm-amd.ko"),
        (Host::Intel, "kvm-intel.ko"),
        (Host::OWN, "kvm-intel.ko"),
    ] {
        assert_eq!(Host::named(host.name()), Some(host));
        let text = script(host, &[job.clone(), folder.clone(), other.clone()]);
        for part in [
            "timeout 300 /lab/minivmm '--engine' 'kvm' '--kernel' '/lab/dr.elf' </dev/null",
            "timeout 7 /lab/minivmm 'matrix' '--guests' '/lab/smp' </dev/null",
            "timeout 300 /lab/kvm-points '/lab/hello' </dev/null",
            module,
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
