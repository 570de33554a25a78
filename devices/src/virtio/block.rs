//! The block device (5.2 "Block Device").
//!
//! A write that was answered with OK is in the disk's file, and after an OK for a flush it is on the medium. Where a flush
//! fails, nobody knows which writes are lost (Linux tells the first caller of fsync, and no other), so from then on no write
//! and no flush succeeds.

use std::{fmt, io};

use virtio_bindings::{
    virtio_blk::{
        VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
        VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
        VIRTIO_BLK_T_WRITE_ZEROES,
    },
    virtio_ids::VIRTIO_ID_BLOCK,
};

use super::{Device, DeviceState, Nonsense, Request};

/// The unit of all positions and lengths.
pub const SECTOR: u64 = 512;
const QUEUE: u16 = 128;
/// Header and status take a descriptor each.
const SEG_MAX: u32 = QUEUE as u32 - 2;
/// With SEG_MAX, this bounds a request to some 8 MB. What is longer is an I/O error.
const SIZE_MAX: u32 = 64 << 10;
/// Sectors of a request that discards or zeroes: 64 MiB.
const ZERO_MAX: u32 = (64 << 20) / SECTOR as u32;
/// A flush costs about as much as moving this many bytes.
const FLUSH_WORK: u64 = 1 << 20;
const ID_LEN: usize = 20;
/// Type, reserved, sector.
const HEADER: u64 = 16;
/// Sector, number of sectors, flags.
const RANGE: u64 = 16;
/// Bit 0 of a range's flags.
const UNMAP: u32 = 1;
/// Data is moved in pieces of this size.
const PIECE: u64 = 64 << 10;

/// Where a disk's bytes are.
pub trait Medium: fmt::Debug + Send {
    /// The size in bytes, a multiple of [`SECTOR`], which never changes.
    fn size(&self) -> u64;

    /// Nothing can be written.
    fn readonly(&self) -> bool;

    /// Fills `bytes` from `offset` on, all or nothing.
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` from `offset` on.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Writes `len` zeroes from `offset` on, and may give the space back.
    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()>;

    /// Returns once everything written so far would outlive a power cut.
    fn flush(&mut self) -> io::Result<()>;
}

/// The device.
#[derive(Debug)]
pub struct Block {
    medium: Box<dyn Medium>,
    id: [u8; ID_LEN],
    write_through: bool,
    failed: bool,
}

/// How a request ended: the status, and the bytes for the driver before it.
type Answer = (u32, u64);

impl Block {
    /// A disk; the driver is told the first 20 bytes of `id` as its serial number.
    pub fn new(medium: Box<dyn Medium>, id: &str) -> Self {
        let mut padded = [0; ID_LEN];
        for (to, from) in padded.iter_mut().zip(id.bytes()) {
            *to = from;
        }
        Block {
            medium,
            id: padded,
            write_through: true,
            failed: false,
        }
    }

    fn sectors(&self) -> u64 {
        self.medium.size() / SECTOR
    }

    /// The byte at which `len` bytes from `sector` on start, if they are whole sectors of the disk.
    fn range(&self, sector: u64, len: u64) -> Option<u64> {
        let last = sector.checked_add(len / SECTOR)?;
        (len.is_multiple_of(SECTOR) && last <= self.sectors()).then(|| sector * SECTOR)
    }

    fn read(&mut self, sector: u64, request: &mut Request) -> Result<Answer, Nonsense> {
        let len = request.writable() - 1;
        let Some(start) = self.range(sector, len) else {
            return Ok((VIRTIO_BLK_S_IOERR, 0));
        };
        let mut buffer = vec![0; len.min(PIECE) as usize];
        let mut done = 0;
        while done < len {
            let piece = &mut buffer[..(len - done).min(PIECE) as usize];
            if self.medium.read(start + done, piece).is_err() {
                return Ok((VIRTIO_BLK_S_IOERR, done));
            }
            request.write(done, piece)?;
            done += piece.len() as u64;
        }
        Ok((VIRTIO_BLK_S_OK, done))
    }

    fn write(&mut self, sector: u64, request: &mut Request) -> Result<u32, Nonsense> {
        let len = request.readable() - HEADER;
        let Some(start) = self.range(sector, len).filter(|_| self.may_write()) else {
            return Ok(VIRTIO_BLK_S_IOERR);
        };
        let mut buffer = vec![0; len.min(PIECE) as usize];
        let mut done = 0;
        while done < len {
            let piece = &mut buffer[..(len - done).min(PIECE) as usize];
            request.read(HEADER + done, piece)?;
            if self.medium.write(start + done, piece).is_err() {
                return Ok(VIRTIO_BLK_S_IOERR);
            }
            done += piece.len() as u64;
        }
        Ok(self.complete_write(request))
    }

    /// 5.2.6.2 "Device Requirements: Device Operation": of the flags, a discard has none and a write of zeroes only UNMAP.
    fn zero(&mut self, flags: u32, request: &mut Request) -> Result<u32, Nonsense> {
        if request.readable() != HEADER + RANGE {
            return Ok(VIRTIO_BLK_S_IOERR);
        }
        let mut range = [0; RANGE as usize];
        request.read(HEADER, &mut range)?;
        let (sector, count) = (u64_at(&range, 0), u32_at(&range, 8));
        if u32_at(&range, 12) & !flags != 0 {
            return Ok(VIRTIO_BLK_S_UNSUPP);
        }
        let len = u64::from(count) * SECTOR;
        request.add_work(len.min(u64::from(ZERO_MAX) * SECTOR));
        match self
            .range(sector, len)
            .filter(|_| self.may_write() && count <= ZERO_MAX)
        {
            Some(start) if self.medium.zero(start, len).is_ok() => Ok(self.complete_write(request)),
            _ => Ok(VIRTIO_BLK_S_IOERR),
        }
    }

    fn may_write(&self) -> bool {
        !self.medium.readonly() && !self.failed
    }

    /// What a write is answered with once it is in the file.
    fn complete_write(&mut self, request: &mut Request) -> u32 {
        if self.write_through {
            self.flush(request)
        } else {
            VIRTIO_BLK_S_OK
        }
    }

    fn flush(&mut self, request: &mut Request) -> u32 {
        request.add_work(FLUSH_WORK);
        self.failed |= self.medium.flush().is_err();
        if self.failed {
            VIRTIO_BLK_S_IOERR
        } else {
            VIRTIO_BLK_S_OK
        }
    }
}

impl Device for Block {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let always = 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_FLUSH;
        let other = if self.medium.readonly() {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        always | other
    }

    fn queues(&self) -> &'static [u16] {
        &[QUEUE]
    }

    /// 5.2.4 "Device configuration layout".
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.sectors().to_le_bytes());
        put(8, &SIZE_MAX.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // max_discard_sectors, max_discard_seg, discard_sector_alignment
        put(36, &ZERO_MAX.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &1u32.to_le_bytes());
        // max_write_zeroes_sectors, max_write_zeroes_seg, write_zeroes_may_unmap
        put(48, &ZERO_MAX.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
        config
    }

    fn negotiated(&mut self, features: u64) {
        // A driver that knows of no flush takes every write for safe (5.2.6.2).
        self.write_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
    }

    fn request(&mut self, _: usize, request: &mut Request) -> Result<u32, Nonsense> {
        let mut header = [0; HEADER as usize];
        request.read(0, &mut header)?;
        let Some(room) = request.writable().checked_sub(1) else {
            return Err(Nonsense("a request without a status"));
        };
        let sector = u64_at(&header, 8);
        let (status, written) = match u32_at(&header, 0) {
            // Header and status may be in one buffer with data.
            _ if u64::from(request.longest()) > u64::from(SIZE_MAX) + HEADER + 1 => (VIRTIO_BLK_S_IOERR, 0),
            VIRTIO_BLK_T_IN => self.read(sector, request)?,
            VIRTIO_BLK_T_OUT => (self.write(sector, request)?, 0),
            VIRTIO_BLK_T_FLUSH => (self.flush(request), 0),
            VIRTIO_BLK_T_GET_ID => {
                let len = room.min(ID_LEN as u64);
                request.write(0, &self.id[..len as usize])?;
                (VIRTIO_BLK_S_OK, len)
            }
            VIRTIO_BLK_T_DISCARD => (self.zero(0, request)?, 0),
            VIRTIO_BLK_T_WRITE_ZEROES => (self.zero(UNMAP, request)?, 0),
            _ => (VIRTIO_BLK_S_UNSUPP, 0),
        };
        request.write(room, &[status as u8])?;
        // The length covers the status only where everything before it has been written, too.
        let len = if written == room { room + 1 } else { written };
        Ok(u32::try_from(len).unwrap_or(u32::MAX))
    }

    fn state(&self) -> DeviceState {
        DeviceState::Block {
            write_through: self.write_through,
            failed: self.failed,
        }
    }

    fn set_state(&mut self, state: &DeviceState) {
        if let DeviceState::Block { write_through, failed } = *state {
            (self.write_through, self.failed) = (write_through, failed);
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4]
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
