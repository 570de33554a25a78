//! Where the kernel's structures have what leads from a process to the paths of the files that it has mapped, as its BTF says.

use super::btf::Btf;

/// Offsets on the way from a process to the paths of its files.
#[derive(Debug)]
pub struct MapLayout {
    pub tree: Tree,
    pub start: u64,
    pub end: u64,
    pub pgoff: u64,
    pub file: u64,
    pub dentry: u64,
    pub mnt: u64,
    pub mode: u64,
    /// `user_path` in `struct backing_file`, whose first member is the file.
    pub user_path: Option<u64>,
    pub name: u64,
    pub len: u64,
    pub parent: u64,
    /// In `struct mount`: the part that files point to, and in that its root.
    pub mount: u64,
    pub mount_root: u64,
    pub mount_parent: u64,
    pub mount_point: u64,
    pub vdso: Option<Vdso>,
}

/// Where a process's mappings are.
#[derive(Debug)]
pub enum Tree {
    RedBlack {
        root: u64,
        node: u64,
        left: u64,
        right: u64,
    },
    Maple {
        root: u64,
        range: Node,
        gaps: Node,
    },
}

/// A node of a maple tree: offsets of its limits and of what they lead to.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub pivots: u64,
    pub slots: u64,
}

#[derive(Debug)]
pub struct Vdso {
    pub address: u64,
    pub image: u64,
    pub data: u64,
    pub size: u64,
}

impl MapLayout {
    /// As the kernel's types say.
    pub fn of(btf: &Btf) -> Option<MapLayout> {
        let area = |path| btf.offset("vm_area_struct", path);
        let mm = |path| btf.offset("mm_struct", path);
        let node = |of| {
            Some(Node {
                pivots: btf.offset(of, "pivot")?,
                slots: btf.offset(of, "slot")?,
            })
        };
        let maple = || {
            Some(Tree::Maple {
                root: mm("mm_mt.ma_root")?,
                range: node("maple_range_64")?,
                gaps: node("maple_arange_64")?,
            })
        };
        let red_black = || {
            Some(Tree::RedBlack {
                root: mm("mm_rb.rb_node")?,
                node: area("vm_rb")?,
                left: area("vm_rb.rb_left")?,
                right: area("vm_rb.rb_right")?,
            })
        };
        let vdso = || {
            Some(Vdso {
                address: mm("context.vdso")?,
                image: mm("context.vdso_image")?,
                data: btf.offset("vdso_image", "data")?,
                size: btf.offset("vdso_image", "size")?,
            })
        };
        Some(MapLayout {
            tree: maple().or_else(red_black)?,
            start: area("vm_start")?,
            end: area("vm_end")?,
            pgoff: area("vm_pgoff")?,
            file: area("vm_file")?,
            dentry: btf.offset("file", "f_path.dentry")?,
            mnt: btf.offset("file", "f_path.mnt")?,
            mode: btf.offset("file", "f_mode")?,
            user_path: btf.offset("backing_file", "user_path"),
            name: btf.offset("dentry", "d_name.name")?,
            len: btf.offset("dentry", "d_name.len")?,
            parent: btf.offset("dentry", "d_parent")?,
            mount: btf.offset("mount", "mnt")?,
            mount_root: btf.offset("mount", "mnt.mnt_root")?,
            mount_parent: btf.offset("mount", "mnt_parent")?,
            mount_point: btf.offset("mount", "mnt_mountpoint")?,
            vdso: vdso(),
        })
    }
}
