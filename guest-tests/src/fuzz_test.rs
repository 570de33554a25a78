use super::*;

#[test]
fn seeds_are_accepted() {
    for archive in initrds() {
        load(&boot(&small_bzimage(), &[part(&archive)], Some(b"x")))
            .map(drop)
            .unwrap();
    }
    for image in multiboot_images() {
        load(&boot(&image, &[module(b"module")], None)).map(drop).unwrap();
    }
    for image in elf_images() {
        let archive = &initrds()[0];
        load(&boot(&image, &[part(archive)], None)).map(drop).unwrap();
    }
    for words in command_lines() {
        let words = words
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8(word.to_vec()).unwrap());
        cli::parse(std::iter::once("minivmm".to_string()).chain(words))
            .map(drop)
            .unwrap();
    }
}

#[test]
fn mutations_differ_and_come_back_with_the_seed() {
    let all = |seed: u64| -> Vec<Vec<u8>> {
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state ^ state >> 32
        };
        (0..50).map(|_| mutate(&[7; 100], &mut random)).collect()
    };
    assert_eq!(all(1), all(1));
    assert_ne!(all(1), all(2));
    assert!(all(1).iter().any(|bytes| bytes.len() < 100) && all(1).iter().any(|bytes| bytes.len() > 100));
    mutate(&[], &mut || 3);
}
