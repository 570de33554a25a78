use super::*;

const KNOWN: &str = "linux-image-amd64 linux-image-6.12-cloud-amd64\nlinux-image-5.10.0-30-cloud-amd64\nlinux-image-5.10.0-32-cloud-amd64
linux-image-5.10.0-32-686-pae\nlinux-image-6.12.95+deb12-cloud-amd64\nlinux-image-6.12.9+deb12-cloud-amd64\nlinux-image-6.12.95+deb12-amd64
linux-image-7.3.4+deb13-cloud-amd64\nlinux-image-7.2.13+deb14-cloud-amd64\nlinux-image-7.3.4+deb13-rt-amd64\nlinux-image-7.3.4+deb13-cloud-amd64-dbg
linux-image-6.1.0-50-rt-686-pae\nlinux-image-6.1.0-50-cloud-amd64-unsigned\n";

fn releases(which: Which) -> Vec<String> {
    choose(KNOWN, which).into_iter().map(|kernel| kernel.release).collect()
}

#[test]
fn the_oldest_and_the_newest_kernel_are_chosen_by_their_numbers_and_one_for_32_bits() {
    assert_eq!(
        releases(Which::Ends),
        ["5.10.0-32-cloud-amd64", "7.3.4+deb13-cloud-amd64", "5.10.0-32-686-pae"]
    );
    assert_eq!(choose("linux-image-6.1.0-9-cloud-amd64", Which::Ends).len(), 1);
    assert_eq!(choose("", Which::Ends), []);
}

#[test]
fn of_each_series_the_newest_is_chosen_and_of_other_flavours_the_newest() {
    assert_eq!(
        releases(Which::All),
        [
            "5.10.0-32-686-pae",
            "5.10.0-32-cloud-amd64",
            "6.12.95+deb12-amd64",
            "6.12.95+deb12-cloud-amd64",
            "7.2.13+deb14-cloud-amd64",
            "7.3.4+deb13-cloud-amd64",
            "7.3.4+deb13-rt-amd64",
        ]
    );
    let pae = Kernel::parse("linux-image-5.10.0-32-686-pae").unwrap();
    assert_eq!((pae.architecture(), pae.flavour.as_str()), (":i386", "686-pae"));
}

#[test]
fn a_kernel_without_its_modules_is_left_out() {
    let images = "linux-image-6.18.15+deb13-cloud-amd64\nlinux-image-6.19.14+deb13-cloud-amd64\nlinux-image-7.2.12+deb13-cloud-amd64";
    let binaries = "linux-binary-6.19.14+deb13-cloud-amd64\nlinux-binary-7.2.12+deb13-cloud-amd64";
    let modules = "linux-modules-7.2.12+deb13-cloud-amd64 - Linux 7.2 for x86-64 cloud";
    assert_eq!(
        whole(images, binaries, modules),
        "linux-image-6.18.15+deb13-cloud-amd64\nlinux-image-7.2.12+deb13-cloud-amd64"
    );
}
